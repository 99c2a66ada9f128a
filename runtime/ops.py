"""The operators that bundles may contain, as data: export checks what it writes, the runtime what it opens.

An operator that is not here never reaches onnxruntime: some crash it while it loads (a 97-byte model with
DepthToSpace and a block size of 2^32 ends in SIGFPE). Nothing here has a subgraph, a file name or a side effect.
LSTM was probed with 55 wrong shapes and attributes: only a batch of 0 rows kills it (1.31), and none is ever run. Conv (patches of
vision transformers) was with 842: all are errors or run.
"""

from __future__ import annotations

from .. import InputError

# The opset versions that may be imported: 17 and 18 run everywhere, 24 is the newest that was probed.
OPSETS: dict[str, range] = {"": range(17, 25), "com.microsoft": range(1, 2)}

_STANDARD = {
    "arithmetic": "Abs Add Ceil Clip Cos Div Erf Exp Floor Log Max Min Mod Mul Neg Pow Reciprocal Round Sign Sin Sqrt Sub Sum",
    "activation": "Elu Gelu HardSigmoid HardSwish LeakyRelu Mish Relu Sigmoid Softplus Softsign Swish Tanh",
    "comparison": "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Where Xor",
    "matrix": "Attention Conv Einsum Gemm LogSoftmax MatMul MatMulInteger RotaryEmbedding Softmax",
    "recurrent": "LSTM",
    # onnxruntime registers SimplifiedLayerNormalization in the standard domain
    "norm": "LayerNormalization LpNormalization RMSNormalization SimplifiedLayerNormalization",
    "reduction": "ArgMax ArgMin CumSum ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare TopK",
    "shape": "Cast CastLike Constant ConstantOfShape Expand Flatten Identity Range Reshape Shape Size Squeeze Unsqueeze",
    "movement": "Concat Gather GatherElements GatherND OneHot Pad Scatter ScatterElements ScatterND Slice Split "
    "TensorScatter Tile Transpose Trilu",
    "quantised": "BitShift BitwiseAnd DequantizeLinear DynamicQuantizeLinear QuantizeLinear",
}
_CONTRIB = {
    "activation": "BiasGelu FastGelu Gelu QuickGelu",
    "matrix": "GroupQueryAttention MatMulNBits MultiHeadAttention RotaryEmbedding",
    "norm": "SkipLayerNormalization SkipSimplifiedLayerNormalization",
    "quantised": "GatherBlockQuantized",
}

OPS: dict[str, frozenset[str]] = {
    "": frozenset(" ".join(_STANDARD.values()).split()),
    "com.microsoft": frozenset(" ".join(_CONTRIB.values()).split()),
}


def check_opset(found: int) -> None:
    known = OPSETS[""]
    if found not in known:
        raise InputError(f"--opset is {found}, wanted {known.start} to {known.stop - 1}")

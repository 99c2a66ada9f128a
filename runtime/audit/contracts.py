"""The table: every operator that a graph may have, and what it must be given. What is not here never reaches onnxruntime.

`why` is given where no graph of the family has the operator: a module of one's own may (`export/own_module.py`), of
which torch.onnx makes what it has names for. Nothing here has a subgraph, a file name or a side effect.
"""

from __future__ import annotations

from . import rules_elementwise as each
from . import rules_fused as fused
from . import rules_gather as gather
from . import rules_reduction as reduction
from . import rules_shape as shape
from .contract import REQUIRED, Attribute, Contract, Rule, contract, number, one_of, whole, wholes

_OWN = "torch.onnx writes it for a module of one's own"
_SIDE = 2**20  # of an axis or a size in an attribute: none of ours comes near
_AXIS = whole(-8, 7)
_EPSILON = number(0, 1, 1e-5)
_FLAG0, _FLAG1 = whole(0, 1, 0), whole(0, 1, 1)
_BEFORE_18, _FROM_18 = range(17, 18), range(18, 25)
_MICROSOFT = "com.microsoft."


def _unary(names: str, types: str = "F", why: str = "") -> dict[str, list[Contract]]:
    return {name: [contract(f"x:{types} -> y:{types}", each.same, why=why)] for name in names.split()}


def _with_alpha(name: str, **defaults: float) -> dict[str, list[Contract]]:
    attributes = {key: number(-1e4, 1e4, value) for key, value in defaults.items()}
    return {name: [contract("x:F -> y:F", each.same, attributes, why=_OWN)]}


def _binary(names: str, types: str, result: str, rule: Rule, why: str = "") -> dict[str, list[Contract]]:
    line = f"a:{types} b:{types} -> y:{result}"
    return {name: [contract(line, rule, why=why)] for name in names.split()}


def _many(name: str, rule: Rule, types: str = "N", why: str = "") -> dict[str, list[Contract]]:
    return {name: [contract(f"x*:{types} -> y:{types}", rule, why=why)]}


def _reduction(name: str, why: str = "", *, axes_are_input_from: int = 18) -> dict[str, list[Contract]]:
    keeps = {"keepdims": _FLAG1}
    as_input = {**keeps, "noop_with_empty_axes": whole(0, 0, 0)}
    newer = contract(
        "x:N axes?!:int64 -> y:N", reduction.reduced, as_input, opsets=range(axes_are_input_from, 25), why=why
    )
    older = contract(
        "x:N -> y:N",
        reduction.reduced,
        {**keeps, "axes": wholes(-8, 7, None)},
        opsets=range(17, axes_are_input_from),
        why=why,
    )
    return {name: [newer, older] if axes_are_input_from > 17 else [newer]}


def _norm(
    name: str, line: str, stash: Attribute, why: str = "", opsets: range = range(17, 25)
) -> dict[str, list[Contract]]:
    attributes = {"axis": whole(-1, 7, -1), "epsilon": _EPSILON, "stash_type": stash}
    return {name: [contract(line, reduction.layer_norm, attributes, opsets=opsets, why=why)]}


_ARITHMETIC = (
    _binary("Add", "N", "N", each.added)
    | _binary("Sub", "N", "N", each.subtracted)
    | _binary("Mul", "N", "N", each.multiplied)
    | _binary("Div", "N", "N", each.divided)
    | {"Mod": [contract("a:N b:N -> y:N", each.remainder, {"fmod": _FLAG0}, why=_OWN)]}
    | {"Pow": [contract("a:F b:N2 -> y:F", each.broadcasting)]}
    | _many("Max", each.largest)
    | _many("Min", each.smallest)
    | _many("Sum", each.broadcasting, "F", why=_OWN)
    | {"Neg": [contract("x:N -> y:N", each.negated)]}
    | _unary("Abs", "N")
    | _unary("Sign", "N", _OWN)
    | _unary("Cos Erf Exp Floor Sin Sqrt")
    | _unary("Ceil Log Reciprocal Round", why=_OWN)
    | {"Clip": [contract("x:N min?:N max?:N -> y:N", each.clipped)]}
)
_ACTIVATION = (
    _unary("Relu Sigmoid Softplus Tanh")
    | _unary("HardSwish Mish Softsign", why=_OWN)
    | _with_alpha("Elu", alpha=1.0)
    | _with_alpha("LeakyRelu", alpha=0.01)
    | _with_alpha("HardSigmoid", alpha=0.2, beta=0.5)
    | {
        "Gelu": [
            contract(
                "x:F -> y:F",
                each.same,
                {"approximate": one_of(b"none", b"tanh", default=b"none")},
                opsets=range(20, 25),
                why="torch.onnx writes it for a module of one's own at opset 20 and above",
            )
        ],
        _MICROSOFT + "Gelu": [contract("x:F -> y:F", each.same)],
        _MICROSOFT + "FastGelu": [contract("x:F -> y:F", each.same)],
        _MICROSOFT + "QuickGelu": [contract("x:F -> y:F", each.same, {"alpha": number(-1e4, 1e4, 1.702)})],
    }
)
_COMPARISON = (
    _binary("Equal", "A", "bool", each.broadcasting)
    | _binary("Greater GreaterOrEqual Less LessOrEqual", "N", "bool", each.broadcasting)
    | _binary("And", "bool", "bool", each.broadcasting)
    | _binary("Or Xor", "bool", "bool", each.broadcasting, _OWN)
    | _unary("Not", "bool", _OWN)
    | {
        "IsNaN": [contract("x:F -> y:bool", each.same, why=_OWN)],
        "IsInf": [
            contract(
                "x:F -> y:bool", each.same, {"detect_negative": _FLAG1, "detect_positive": _FLAG1}, why=_OWN
            )
        ],
        "Where": [contract("condition:bool x:A y:A -> z:A", each.chosen)],
    }
)
_MATRIX = {
    "MatMul": [contract("a:F b:F -> y:F", reduction.product)],
    "Gemm": [
        contract(
            "A:F B:F C?:F -> y:F",
            reduction.general_product,
            {
                "transA": _FLAG0,
                "transB": _FLAG0,
                "alpha": number(-1e4, 1e4, 1.0),
                "beta": number(-1e4, 1e4, 1.0),
            },
            why=_OWN,
        )
    ],
    "Conv": [
        contract(
            "x:F W!:F B?!:F -> y:F",
            reduction.convolved,
            {
                "auto_pad": one_of(b"NOTSET", default=b"NOTSET"),
                "group": whole(1, _SIDE, 1),
                "kernel_shape": wholes(1, _SIDE, None),
                "strides": wholes(1, _SIDE, None),
                "dilations": wholes(1, _SIDE, None),
                "pads": wholes(0, _SIDE, None),
            },
            why=_OWN,
        )
    ],
    "Einsum": [
        contract(
            "x*:F -> y:F",
            reduction.summed,
            {
                "equation": Attribute(
                    bytes, "letters", lambda text: len(text) < 64 and text.isascii(), REQUIRED
                )
            },
            why=_OWN,
        )
    ],
    "Softmax": [contract("x:F -> y:F", reduction.along_axis, {"axis": whole(-8, 7, -1)})],
    "LogSoftmax": [contract("x:F -> y:F", reduction.along_axis, {"axis": whole(-8, 7, -1)}, why=_OWN)],
    _MICROSOFT + "MatMulNBits": [
        contract(
            "x:F codes!:uint8 scales!:F zeros?!:uint8 g_idx?!:int32 bias?!:F -> y:F",
            fused.block_product,
            {
                "K": whole(1, _SIDE),
                "N": whole(1, _SIDE),
                "bits": one_of(4, 8),
                "block_size": one_of(16, 32, 64, 128),
                "accuracy_level": one_of(0, 1, 4, default=0),
            },
        )
    ],
    _MICROSOFT + "GatherBlockQuantized": [
        contract(
            "codes!:uint8 indices:int64 scales!:F zeros?!:uint8 -> y:F",
            fused.block_rows,
            {
                "bits": one_of(4, 8),
                "block_size": one_of(16, 32, 64, 128),
                "gather_axis": whole(0, 0),
                "quantize_axis": whole(1, 1),
            },
        )
    ],
    _MICROSOFT + "GroupQueryAttention": [
        contract(
            "query:F key?:F value?:F past_key:cache past_value:cache seqlens_k:int32 total_sequence_length:int32 "
            "cos?!:F sin?!:F position_ids?:int64 attention_bias?:F head_sink?:F k_scale?!:float32 v_scale?!:float32 "
            "-> y:F present_key:cache present_value:cache",
            fused.cached_attention,
            {
                "num_heads": whole(1, 4096),
                "kv_num_heads": whole(1, 4096),
                "scale": number(1e-8, 1e4, None),
                "do_rotary": _FLAG0,
                "softcap": number(0, 1e4, 0.0),
                "local_window_size": whole(1, 2**31 - 1, None),
                "k_quant_type": one_of(b"PER_CHANNEL", default=None),
                "v_quant_type": one_of(b"PER_CHANNEL", default=None),
                "kv_cache_bit_width": whole(8, 8, None),
            },
        )
    ],
    "LSTM": [
        contract(
            "x:float32 W:float32 R:float32 B?:float32 sequence_lens?:int32 initial_h?:float32 initial_c?:float32 "
            "-> y?:float32 y_h?:float32 y_c?:float32",
            fused.recurrent,
            {
                "hidden_size": whole(1, _SIDE),
                "activations": Attribute(
                    tuple,
                    "Sigmoid and twice Sigmoid or Tanh",
                    lambda names: (
                        len(names) == 3 and names[0] == "Sigmoid" and {*names} <= {"Sigmoid", "Tanh"}
                    ),
                    ("Sigmoid", "Tanh", "Tanh"),
                ),
                "direction": one_of(b"forward", default=b"forward"),
                "layout": whole(0, 0, 0),
            },
        )
    ],
}
_NORM = (
    _norm("LayerNormalization", "x:F scale:F bias?:F -> y:F", whole(1, 1, 1))
    # onnxruntime registers it in the standard domain
    | _norm("SimplifiedLayerNormalization", "x:F scale:F -> y:F", whole(1, 1, 1))
    | _norm("RMSNormalization", "x:F scale:F -> y:F", whole(1, 1, 1), _OWN, range(23, 25))
    | {
        _MICROSOFT + "SkipSimplifiedLayerNormalization": [
            contract(
                "x:F skip:F scale:F -> y:F mean?:float32 deviation?:float32 sum?:F",
                reduction.skip_norm,
                {"epsilon": _EPSILON},
            )
        ]
    }
)
_REDUCTION = (
    _reduction("ReduceSum", axes_are_input_from=17)
    | _reduction("ReduceMax")
    | _reduction("ReduceMean")
    | _reduction("ReduceMin", _OWN)
    | _reduction("ReduceL2", _OWN)
    | _reduction("ReduceProd", _OWN)
    | _reduction("ReduceSumSquare", _OWN)
    | {
        name: [
            contract(
                "x:N -> y:int64",
                reduction.extreme_place,
                {"axis": whole(-8, 7, 0), "keepdims": _FLAG1, "select_last_index": _FLAG0},
                why=why,
            )
        ]
        for name, why in {"ArgMax": "", "ArgMin": _OWN}.items()
    }
    | {
        "CumSum": [
            contract("x:N axis!:I2 -> y:N", reduction.running_sum, {"exclusive": _FLAG0, "reverse": _FLAG0})
        ],
        "TopK": [
            contract(
                "x:N k:int64 -> y:N indices:int64",
                reduction.best,
                {"axis": whole(-8, 7, -1), "largest": _FLAG1, "sorted": _FLAG1},
            )
        ],
    }
)
_SHAPE = {
    "Cast": [contract("x:A -> y:@to", each.kept, {"to": one_of(1, 6, 7, 9, 10)})],
    "CastLike": [contract("x:A like:A2 -> y:A2", each.same, why=_OWN)],
    "ConstantOfShape": [
        contract(
            "shape:int64 -> y:@value",
            shape.filled,
            {"value": Attribute(memoryview, "one number", shape.constant_value, None)},
            why=_OWN,
        )
    ],
    "Expand": [contract("x:A shape:int64 -> y:A", shape.expanded)],
    "Flatten": [contract("x:A -> y:A", shape.flattened, {"axis": whole(-8, 8, 1)}, why=_OWN)],
    "Identity": [
        contract(
            "x:A -> y:A", each.kept, why="the exporter's Builder writes it where one value is two outputs"
        )
    ],
    "Range": [contract("start:N limit:N delta:N -> y:N", shape.counted, why=_OWN)],
    "Reshape": [contract("x:A shape:int64 -> y:A", shape.reshaped, {"allowzero": _FLAG0})],
    "Shape": [
        contract("x:A -> y:int64", each.lengths, {"start": whole(-8, 7, 0), "end": whole(-8, 8, None)})
    ],
    "Size": [contract("x:A -> y:int64", each.count, why=_OWN)],
    "Squeeze": [contract("x:A axes?!:int64 -> y:A", shape.squeezed)],
    "Unsqueeze": [contract("x:A axes!:int64 -> y:A", shape.unsqueezed)],
}
_MOVEMENT = {
    "Concat": [contract("x*:A -> y:A", shape.joined, {"axis": _AXIS})],
    "Gather": [contract("x:A indices:I -> y:A", gather.gathered, {"axis": whole(-8, 7, 0)})],
    "GatherElements": [contract("x:A indices:I -> y:A", gather.gathered_elements, {"axis": whole(-8, 7, 0)})],
    "GatherND": [contract("x:A indices:int64 -> y:A", gather.gathered_nd, {"batch_dims": whole(0, 7, 0)})],
    "Pad": [
        contract(
            "x:A pads!:int64 value?:A -> y:A",
            shape.padded,
            {"mode": one_of(b"constant", default=b"constant")},
        )
    ],
    "ScatterElements": [
        contract(
            "x:A indices:I updates:A -> y:A",
            gather.scattered_elements,
            {"axis": whole(-8, 7, 0), "reduction": one_of(b"none", b"add", default=b"none")},
        )
    ],
    "ScatterND": [
        contract(
            "x:A indices:int64 updates:A -> y:A",
            gather.scattered_nd,
            {"reduction": one_of(b"none", b"add", default=b"none")},
            why=_OWN,
        )
    ],
    "Slice": [contract("x:A starts:I ends:I axes?!:I steps?!:I -> y:A", gather.sliced)],
    "Split": [
        contract("x:A split?!:int64 -> y*:A", shape.split, {"axis": whole(-8, 7, 0)}, opsets=_BEFORE_18),
        contract(
            "x:A split?!:int64 -> y*:A",
            shape.split,
            {"axis": whole(-8, 7, 0), "num_outputs": whole(1, 64, None)},
            opsets=_FROM_18,
        ),
    ],
    "Tile": [contract("x:A repeats:int64 -> y:A", shape.tiled, why=_OWN)],
    "Transpose": [contract("x:A -> y:A", shape.transposed, {"perm": wholes(0, 7, ())})],
    "Trilu": [contract("x:A k?:int64 -> y:A", shape.triangle, {"upper": _FLAG1}, why=_OWN)],
}

CONTRACTS: dict[str, list[Contract]] = (
    _ARITHMETIC | _ACTIVATION | _COMPARISON | _MATRIX | _NORM | _REDUCTION | _SHAPE | _MOVEMENT
)


def contract_of(op: str, opset: int) -> Contract | None:
    return next((found for found in CONTRACTS.get(op, ()) if opset in found.opsets), None)


def _by_domain() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {"": set(), "com.microsoft": set()}
    for name in CONTRACTS:
        domain, _, op = name.rpartition(".")
        found[domain].add(op)
    return {domain: frozenset(ops) for domain, ops in found.items()}


OPS = _by_domain()  # by their domains

"""Every operator that either target emits has a CUDA kernel: no GPU is at hand, onnxruntime's table of kernels is.

One exception is known and held here: GroupQueryAttention has none in float32, which is why the runtime refuses
fp32 bundles of the target `ort` on CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import onnx
import onnx_ir as ir
import pytest
import torch
from cuda_coverage import FACTS, cpu_by_design, device_reads, missing_cuda_kernels
from make_cuda_kernels import read_rows, read_signature, read_types, read_versions
from onnx import TensorProto, helper

from tfmx.export.arithmetic import EXACT, Arithmetic
from tfmx.export.choice_graphs import sample_graph, select_graph
from tfmx.export.layout import BlockLayout, Target
from tfmx.export.recipe import parse_layout
from tfmx.export.stitch import GraphKind, WeightPlan, stitch_decoder
from tfmx.export.trace import DecoderFragments, trace_decoder
from tfmx.export.weights import link_weights, stored_tensors, torch_dtype
from tfmx.runtime.audit.contracts import OPS
from tfmx.runtime.devices import _HEAVY_OPS
from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RotaryConfig,
    RotaryScaling,
    TokenInputs,
)
from tfmx.tfm_model.transformer import Transformer

OPSETS = (17, 18, 21, 24)
GQA_IN_FLOAT32 = "com.microsoft::GroupQueryAttention (since 1) with M=int32, T=float, T_CACHE=float"
GQA_IN_FLOAT32_OVER_INT8 = (
    "com.microsoft::GroupQueryAttention (since 1) with M=int32, T=float, T_CACHE=int8, T_KV_SCALE=float"
)

_LLAMA = ModelConfig(
    inputs=TokenInputs(vocab_size=97),
    width=32,
    n_layers=2,
    context=128,  # above 100: the rotary and column tables are not "small" to onnxruntime, as in a real model
    norm=NormConfig(),
    mixer=AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16, rotary=RotaryConfig(dim=16)),
    mlp=MlpConfig(hidden=48),
    head=HeadConfig(tied=True),
)
# Between them they use every lowering of both targets.
CONFIGS = {
    "llama": _LLAMA,
    "layernorm, windows, soft-caps, partial rotary": replace(
        _LLAMA,
        norm=NormConfig(kind="layer", bias=True),
        mixer=AttentionConfig(
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            qkv_bias=True,
            out_bias=True,
            softcap=5.0,
            rotary=RotaryConfig(dim=8),
        ),
        mlp=MlpConfig(hidden=48, activation="gelu", gated=False, bias=True),
        windows=(5, None),
        head=HeadConfig(tied=True, softcap=30.0),
        inputs=TokenInputs(vocab_size=97, scale=8.0),
    ),
    "query norm, dynamic rotary, geglu, untied": replace(
        _LLAMA,
        mixer=AttentionConfig(
            n_heads=4,
            n_kv_heads=4,
            head_dim=16,
            qk_norm=NormConfig(),
            rotary=RotaryConfig(dim=16, scaling=RotaryScaling(kind="dynamic", factor=2, original_context=32)),
        ),
        mlp=MlpConfig(hidden=48, activation="gelu_tanh"),
        head=HeadConfig(bias=True),
    ),
    "no positions, relu": replace(
        _LLAMA,
        mixer=AttentionConfig(n_heads=4, n_kv_heads=1, head_dim=24),
        mlp=MlpConfig(hidden=48, activation="relu", gated=False),
    ),
}
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}

every_target = pytest.mark.parametrize("target", ["ort", "portable"])
every_dtype = pytest.mark.parametrize("dtype", ["fp32", "fp16"])
every_config = pytest.mark.parametrize("config", list(CONFIGS))


@cache
def fragments(config: str, dtype: str) -> DecoderFragments:
    return trace_decoder(CONFIGS[config], torch_dtype(DTYPES[dtype]))


def emitted_graphs(
    config: str,
    target: Target,
    dtype: str,
    opset: int,
    blocks: dict[str, BlockLayout] | None = None,
    arithmetic: Arithmetic = EXACT,
) -> dict[GraphKind, onnx.ModelProto]:
    """The graphs as export writes them, their weights named but not stored."""
    model_config = CONFIGS[config]
    with torch.device("meta"):
        spec = Transformer(model_config).state_spec()
    tied = {"head.weight": "embed.weight"} if model_config.head.tied else {}
    plan = WeightPlan(DTYPES[dtype], tied, blocks)
    models = {
        kind: stitch_decoder(
            kind, model_config, fragments(config, dtype), spec, target, opset, plan, arithmetic
        )
        for kind in ("prefill", "decode")
    }
    link_weights(models.values(), stored_tensors(models.values(), lambda _: torch.empty))
    return {kind: ir.to_proto(model) for kind, model in models.items()}


@every_config
@every_dtype
@every_target
def test_every_emitted_operator_has_a_cuda_kernel(target: Target, dtype: str, config: str):
    expected = {GQA_IN_FLOAT32} if (target, dtype) == ("ort", "fp32") else set()
    for opset in OPSETS:
        for kind, model in emitted_graphs(config, target, dtype, opset).items():
            assert set(missing_cuda_kernels(model)) == expected, f"{kind} at opset {opset}"


@every_dtype
@every_target
@every_config
@pytest.mark.parametrize("layout", ["int4-32", "int8-16-zeros", "int4-32-shifts"])
@pytest.mark.parametrize("kv", ["float", "int8"])
def test_quantised_graphs_have_cuda_kernels_too(target: Target, dtype: str, layout: str, config: str, kv):
    if kv == "int8" and target == "portable":
        pytest.skip("refused: only the fused attention has such a cache")
    with torch.device("meta"):
        weights = dict(Transformer(CONFIGS[config]).named_parameters())
    form = parse_layout(layout)
    blocks = {
        name: form for name, w in weights.items() if w.dim() == 2 and w.shape[1] % form.format.block == 0
    }
    kernel = GQA_IN_FLOAT32 if kv == "float" else GQA_IN_FLOAT32_OVER_INT8
    expected = {kernel} if (target, dtype) == ("ort", "fp32") else set()
    arithmetic = Arithmetic(activations="int8", kv=kv)
    for model in emitted_graphs(config, target, dtype, 18, blocks, arithmetic).values():
        assert set(missing_cuda_kernels(model)) == expected


@every_config
@every_dtype
@every_target
def test_onnxruntime_leaves_only_shape_arithmetic_to_the_cpu(target: Target, dtype: str, config: str):
    for model in emitted_graphs(config, target, dtype, 18).values():
        for typed in cpu_by_design(model):
            assert typed.node.op_type not in _HEAVY_OPS
            assert set(typed.types.values()) <= {"int32", "int64"}, str(typed)


@every_config
@every_target
def test_a_decode_step_never_waits_for_a_number_from_the_gpu(target: Target, config: str):
    assert device_reads(emitted_graphs(config, target, "fp16", 18)["decode"]) == []


# --- the check has teeth ---------------------------------------------------------------------------------


def graph_of(
    op: str,
    *dtypes: int,
    domain: str = "",
    opset: int = 18,
    out: int = TensorProto.FLOAT,
    **attributes: object,
):
    names = [f"in{i}" for i in range(len(dtypes))]
    inputs = [
        helper.make_tensor_value_info(name, dtype, None) for name, dtype in zip(names, dtypes, strict=True)
    ]
    node = helper.make_node(op, names, ["out"], name="planted", domain=domain, **attributes)
    graph = helper.make_graph([node], "planted", inputs, [helper.make_tensor_value_info("out", out, None)])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        (graph_of("Mish", FLOAT), "ai.onnx::Mish (since 18) with T=float"),
        (graph_of("BitwiseAnd", INT64, INT64), "ai.onnx::BitwiseAnd (since 18) with T=int64"),
        (graph_of("Sum", INT64), "ai.onnx::Sum (since 13) with T=int64"),  # there, but not for this type
        (graph_of("ReduceMean", INT64), "ai.onnx::ReduceMean (since 18) with T=int64"),
        (graph_of("Range", HALF, HALF, HALF), "ai.onnx::Range (since 11) with T=float16"),
        (graph_of("ArgMax", FLOAT, select_last_index=1), "ai.onnx::ArgMax (since 13) with T=float"),
        (graph_of("NGramRepeatBlock", INT64, domain="com.microsoft"), "com.microsoft::NGramRepeatBlock (since 1) with ?=int64"),
    ],
    ids=lambda value: value.graph.node[0].op_type if isinstance(value, onnx.ModelProto) else "",
)  # fmt: skip
def test_a_planted_operator_without_a_kernel_is_reported(model: onnx.ModelProto, missing: str):
    assert missing_cuda_kernels(model) == [missing]


@pytest.mark.parametrize("op", ["Neg", "Relu"])
def test_operators_with_a_kernel_are_not_reported(op: str):
    assert missing_cuda_kernels(graph_of(op, HALF)) == []


def test_a_fault_planted_in_an_exported_graph_is_reported():
    model = emitted_graphs("llama", "portable", "fp16", 18)["decode"]
    sigmoid = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    sigmoid.op_type = "Mish"
    assert missing_cuda_kernels(model) == ["ai.onnx::Mish (since 18) with T=float16"]


def test_a_node_that_follows_shapes_but_has_no_kernel_is_missing_and_not_by_design():
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Sub", ["shape", "shape"], ["by_design"]),
        helper.make_node("Sum", ["shape", "shape"], ["missing"]),  # CUDA has no Sum of integers
        helper.make_node("Expand", ["x", "shape"], ["y"]),  # reads the shape where it is: stays on the GPU
    ]
    x = helper.make_tensor_value_info("x", HALF, [None])
    model = helper.make_model(
        helper.make_graph(nodes, "shapes", [x], []), opset_imports=[helper.make_opsetid("", 18)]
    )
    assert missing_cuda_kernels(model) == ["ai.onnx::Sum (since 13) with T=int64"]
    assert [typed.node.op_type for typed in cpu_by_design(model)] == ["Sub"]
    assert device_reads(model) == []


def test_a_shape_that_the_gpu_computes_is_reported_as_a_wait():
    length = helper.make_node("ReduceSum", ["mask"], ["length"], name="count")
    expand = helper.make_node("Expand", ["mask", "length"], ["y"], name="expand")
    mask = helper.make_tensor_value_info("mask", INT64, [None])
    graph = helper.make_graph([length, expand], "waits", [mask], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    assert device_reads(model) == ["expand reads length"]


# --- the facts -------------------------------------------------------------------------------------------


def test_the_facts_name_their_source_and_cover_only_operators_of_bundles():
    assert FACTS["commit"] in FACTS["source"]
    assert FACTS["version"]
    for name in FACTS["kernels"]:
        domain, op = name.split("::")
        assert op in OPS["" if domain == "ai.onnx" else domain]


DOCUMENT = """## Operators implemented by CPUExecutionProvider
|**Operator Domain:** *ai.onnx*||||
|Sub|*in* A:**T**<br> *out* C:**T**|14+|**T** = tensor(float)|

## Operators implemented by CUDAExecutionProvider

| Op Name | Parameters | OpSet Version | Types Supported |
|---------|------------|---------------|-----------------|
|**Operator Domain:** *ai.onnx*||||
|Add|*in* A:**T**<br> *in* n:**tensor(int64)**<br> *out* C:**T1**<br><br>or<br><br>*in* A:**T**|14+|**T** = tensor(float), tensor(int8)<br/> **T1** = tensor(bool)|
|||[7, 13]|**T** = tensor(float)|
| |
|**Operator Domain:** *com.microsoft*||||
|Gelu|*in* X:**T**<br> *out* Y:**T**|1|**T** = tensor(float)|

## Operators implemented by DmlExecutionProvider
|**Operator Domain:** *ai.onnx*||||
|Mul|*in* A:**T**<br> *out* C:**T**|14+|**T** = tensor(float)|
"""


def test_the_table_is_read_row_by_row():
    rows = read_rows(DOCUMENT, "CUDAExecutionProvider")
    assert [(row.domain, row.op, read_versions(row.versions), read_types(row.types)) for row in rows] == [
        ("", "Add", [14, None], {"T": ["float", "int8"], "T1": ["bool"]}),
        ("", "Add", [7, 13], {"T": ["float"]}),
        ("com.microsoft", "Gelu", [1, 1], {"T": ["float"]}),
    ]
    assert read_signature(rows[1].parameters) == {"inputs": ["T", "tensor(int64)"], "outputs": ["T1"]}


@pytest.mark.parametrize("opset", OPSETS)
def test_the_graphs_that_choose_tokens_have_cuda_kernels(opset: int) -> None:
    for graph in (select_graph(97, opset), sample_graph(97, opset)):
        assert missing_cuda_kernels(ir.to_proto(graph)) == []

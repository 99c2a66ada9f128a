"""Matrices in blocks: what rounding loses, how ONNX Runtime reads what was packed, and the blocks of GGUF files."""

from __future__ import annotations

import gguf
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import real_models
import torch
from gguf import GGMLQuantizationType as Type
from onnx import TensorProto, helper
from tiny_checkpoints import tiny_model, write_gguf

from tfmx.export.rounding import round_nearest, round_search
from tfmx.tfm_model.blocks import BlockError, BlockFormat, Blocks, concat
from tfmx.tfm_model.checkpoint import CheckpointError, read_finite_blocks
from tfmx.tfm_model.gguf_file import read_gguf
from tfmx.tfm_model.gguf_tensors import gguf_blocks
from tfmx.tfm_model.source import open_checkpoint

FORMATS = [
    BlockFormat(bits=bits, block=block, zero_points=zero_points)
    for bits in (4, 8)
    for block in (16, 32, 64, 128)
    for zero_points in (False, True)
]
ROUNDINGS = {"nearest": round_nearest, "search": round_search}
KEPT = [Type.Q4_0, Type.Q4_1, Type.Q8_0]


def name_of(format_: BlockFormat) -> str:
    return f"int{format_.bits}-{format_.block}{'-zeros' if format_.zero_points else ''}"


formats = pytest.mark.parametrize("format_", FORMATS, ids=name_of)
roundings = pytest.mark.parametrize("rounding", ROUNDINGS)


def random_matrix(rows: int = 40, columns: int = 384, seed: int = 0) -> torch.Tensor:
    """Blocks differ in size and in where their middle lies; a few weights stick out."""
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=random)
    w += torch.randn(rows, columns // 16, generator=random).repeat_interleave(16, dim=1)
    w *= torch.rand(rows, columns // 16, generator=random).repeat_interleave(16, dim=1) + 0.01
    w[torch.rand(w.shape, generator=random) < 0.01] *= 5
    return w


def block_errors(w: torch.Tensor, blocks: Blocks, importance: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Squared, of each block, in float64."""
    errors = (blocks.dequantised(torch.float64) - w.double()).square() * importance
    return errors.unflatten(1, (-1, blocks.format.block)).sum(dim=-1)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


# --- rounding --------------------------------------------------------------------------------------------


@formats
def test_the_nearest_code_is_at_most_half_a_step_away(format_):
    w = random_matrix()
    blocks = round_nearest(w, format_)
    steps = (blocks.dequantised() - w).unflatten(1, (-1, format_.block)).abs() / blocks.scales.abs()[
        ..., None
    ]
    at_end = (blocks.codes == 0) | (blocks.codes == format_.top)
    assert steps[~at_end].max() <= 0.5 + 1e-4
    # An end may be cut: half a step where the zero point was rounded, one where there is no code for +8.
    assert steps[at_end].max() <= (0.5 if format_.zero_points else 1.0) + 0.5


@roundings
@formats
def test_zero_stays_zero_and_a_block_of_zeros_too(format_, rounding):
    w = random_matrix()
    w[:, 5], w[3] = 0.0, 0.0
    w[7, :128] = 0.0
    w[8] = w[8].abs() + 1.0  # zero is not within
    w[8, 5] = 0.0
    found = ROUNDINGS[rounding](w, format_).dequantised()
    assert found[w == 0].eq(0).all()


@roundings
@formats
@pytest.mark.parametrize("size", [1e-44, 1e-38, 3e38], ids=["subnormal", "smallest", "largest"])
def test_tiny_and_huge_weights_are_rounded_too(format_, rounding, size):
    w = random_matrix().double()
    w *= size / w.abs().max()
    found = ROUNDINGS[rounding](w.float(), format_).dequantised(torch.float64)
    assert found.isfinite().all()
    tolerance = w.unflatten(1, (-1, format_.block)).abs().amax(dim=-1) / format_.middle
    error = (found - w).unflatten(1, (-1, format_.block)).abs()
    smallest = 2.0**-149 * format_.top  # a scale below the smallest subnormal is none
    assert (error <= 2 * tolerance[..., None] + smallest).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@formats
def test_search_is_never_worse_than_nearest_in_any_block(format_, weighted):
    w = random_matrix()
    importance = torch.rand(w.shape[1]).square() * 10 + 1e-3 if weighted else None
    weights = importance.double() if importance is not None else 1.0
    nearest = block_errors(w, round_nearest(w, format_), weights)
    search = block_errors(w, round_search(w, format_, importance=importance), weights)
    assert (search <= nearest * (1 + 1e-5)).all()  # float32 decides, float64 judges
    assert search.sum() < 0.98 * nearest.sum()


@pytest.mark.parametrize("zero_points", [False, True])
def test_search_finds_what_many_more_candidates_find(zero_points):
    format_ = BlockFormat(bits=4, zero_points=zero_points)
    w = random_matrix(16, 256)
    blocks = w.double().unflatten(1, (-1, 32))
    widest = blocks.abs().amax(dim=-1)
    best = torch.full(widest.shape, torch.inf, dtype=torch.float64)
    for zero in range(16) if zero_points else [8]:
        for step in torch.linspace(0.04, 0.4, 250):
            for sign in (1, -1):
                scale = (widest * step * sign)[..., None]
                rounded = ((blocks / scale).round() + zero).clamp(0, 15) - zero
                best = torch.minimum(best, (rounded * scale - blocks).square().sum(dim=-1))
    assert block_errors(w, round_search(w, format_)).sum() < 1.03 * best.sum()


@roundings
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_were_rounded_before_stay_as_they_are(bits, rounding):
    format_ = BlockFormat(bits=bits)
    once = round_nearest(random_matrix(), format_)
    again = ROUNDINGS[rounding](once.dequantised(), format_)
    assert_same_bits(again.dequantised(), once.dequantised())


def test_importance_moves_the_error_to_where_it_matters_less():
    format_, w = BlockFormat(bits=4), random_matrix()
    importance = torch.ones(w.shape[1])
    importance[::4] = 100.0
    plain, weighted = (round_search(w, format_, importance=i).dequantised() - w for i in (None, importance))
    assert weighted[:, ::4].square().sum() < 0.8 * plain[:, ::4].square().sum()
    assert weighted.square().sum() > plain.square().sum()


def test_inputs_that_were_never_seen_do_not_break_the_search():
    format_, w = BlockFormat(bits=4, zero_points=True), random_matrix()
    importance = torch.zeros(w.shape[1])
    assert round_search(w, format_, importance=importance).dequantised().isfinite().all()
    importance[40:50] = 3.0
    assert (round_search(w, format_, importance=importance).dequantised() - w).abs().max() < 2


def test_large_matrices_are_rounded_chunk_by_chunk_to_the_same():
    w = random_matrix(2000, 384)  # three chunks
    whole, part = (round_search(m, BlockFormat(bits=4, zero_points=True)) for m in (w, w[1990:]))
    assert torch.equal(whole.codes[1990:], part.codes)
    assert torch.equal(whole.scales[1990:], part.scales)


def test_half_precision_weights_are_rounded_as_the_numbers_they_are():
    w = random_matrix().to(torch.bfloat16)
    assert torch.equal(
        round_search(w, BlockFormat(bits=4)).codes, round_search(w.float(), BlockFormat(bits=4)).codes
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockFormat(bits=3), "weights of 3 bits, wanted 4 or 8"),
        (lambda: BlockFormat(bits=4, block=48), "blocks of 48 weights, wanted 16, 32, 64 or 128"),
        (
            lambda: BlockFormat(bits=4, block=128).check("blocks.0.mlp.up.weight", (3072, 576)),
            "blocks.0.mlp.up.weight has rows of 576 weights, no multiple of 128; blocks of 16, 32 or 64 do",
        ),
        (lambda: round_nearest(torch.ones(4, 40), BlockFormat(bits=4), "w"), "w has rows of 40 weights, no multiple of 32; leave it as it is"),
        (lambda: round_search(torch.ones(4, 48), BlockFormat(bits=8), "w"), "no multiple of 32; blocks of 16 do"),
        (lambda: round_nearest(torch.ones(64), BlockFormat(bits=4), "norm"), "norm has shape [64], wanted a matrix"),
    ],
)  # fmt: skip
def test_what_cannot_be_blocks_is_refused_with_what_can(make, words):
    with pytest.raises(BlockError) as caught:
        make()
    assert words in str(caught.value)


# --- packing ---------------------------------------------------------------------------------------------


@formats
def test_packed_codes_and_zeros_are_what_a_slow_reader_finds(format_):
    blocks = round_nearest(random_matrix(3, 384), format_)
    codes, per_byte = blocks.packed_codes().tolist(), 8 // format_.bits
    for row, row_codes in enumerate(blocks.codes.tolist()):
        for block, block_codes in enumerate(row_codes):
            for i, code in enumerate(block_codes):
                byte = codes[row][block][i // per_byte]
                assert byte >> (format_.bits * (i % per_byte)) & format_.top == code
    if format_.zero_points:
        packed = blocks.packed_zeros()
        assert packed.shape == (3, -(-384 // format_.block * format_.bits // 8))
        for row, zeros in enumerate(blocks.zeros.tolist()):
            for i, zero in enumerate(zeros):
                byte = int(packed[row, i // per_byte])
                assert byte >> (format_.bits * (i % per_byte)) & format_.top == zero


def run_node(op: str, inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray], **attributes: int):
    """One contrib node in ONNX Runtime; what it is given, then its constants."""
    node = helper.make_node(op, [*inputs, *constants], ["y"], domain="com.microsoft", **attributes)
    if op == "GatherBlockQuantized":  # data, indices, scales, zero points
        node.input[:] = ["data", "indices", *list(constants)[1:]]
    graph = helper.make_graph(
        [node],
        "node",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, inputs)[0])


@roundings
@formats
@pytest.mark.parametrize("rows", [1, 5])
def test_onnxruntime_multiplies_with_the_weights_that_the_blocks_mean(format_, rounding, rows):
    blocks = ROUNDINGS[rounding](random_matrix(48, 384), format_)
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(1))
    constants = {"codes": blocks.packed_codes().numpy(), "scales": blocks.scales.numpy()}
    if format_.zero_points:
        constants["zeros"] = blocks.packed_zeros().numpy()
    found = run_node(
        "MatMulNBits", {"x": x.numpy()}, constants,
        K=384, N=48, bits=format_.bits, block_size=format_.block, accuracy_level=0,
    )  # fmt: skip
    exact = x.double() @ blocks.dequantised(torch.float64).T
    assert (found - exact).norm() < 1e-6 * exact.norm()


@roundings
@formats
def test_onnxruntime_gathers_the_weights_that_the_blocks_mean(format_, rounding):
    blocks = ROUNDINGS[rounding](random_matrix(48, 384), format_)
    constants = {"data": blocks.packed_codes().flatten(1).numpy(), "scales": blocks.scales.numpy()}
    if format_.zero_points:
        constants["zeros"] = blocks.packed_zeros().numpy()
    indices = torch.tensor([[3, 0, 47], [3, 20, 1]])
    found = run_node(
        "GatherBlockQuantized", {"indices": indices.numpy()}, constants,
        bits=format_.bits, block_size=format_.block, quantize_axis=1, gather_axis=0,
    )  # fmt: skip
    assert_same_bits(found, blocks.dequantised()[indices])


def test_rows_and_concat_are_what_they_are_for_matrices():
    w, format_ = random_matrix(), BlockFormat(bits=4, zero_points=True)
    blocks, order = round_nearest(w, format_), torch.tensor([5, 2, 31])
    assert torch.equal(blocks.rows(order).dequantised(), blocks.dequantised()[order])
    parts = [blocks.rows(torch.arange(10)), blocks.rows(torch.arange(10, 40))]
    assert torch.equal(concat(parts).dequantised(), blocks.dequantised())
    with pytest.raises(ValueError, match="different formats"):
        concat([blocks, round_nearest(w, BlockFormat(bits=4))])


# --- GGUF ------------------------------------------------------------------------------------------------


def random_blocks(type_: Type, rows: int, columns: int) -> np.ndarray:
    """Bytes of blocks with scales (and smallest weights) of either sign, some of them subnormal or zero."""
    per_block, size = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (rows, columns // per_block, size), np.uint8)
    for at in (0, 2) if type_ == Type.Q4_1 else (0,):
        blocks[:, :, at + 1] &= 0xBB  # the exponents: finite ones
    blocks[0, 0, :2] = 0
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("type_", KEPT, ids=lambda type_: type_.name)
def test_the_blocks_of_a_gguf_file_are_exact(type_):
    data = random_blocks(type_, 64, 256)
    assert_same_bits(
        gguf_blocks(data, type_).dequantised(), torch.from_numpy(gguf.quants.dequantize(data, type_))
    )


@pytest.mark.parametrize("type_", [*KEPT, Type.Q5_1, Type.F16], ids=lambda type_: type_.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_of_a_gguf_file_have_their_blocks_in_order_and_below_each_other(tmp_path, family, type_):
    write_gguf(tmp_path / "model.gguf", tiny_model(family), matrices=type_)
    tensors = read_gguf(tmp_path / "model.gguf").tensors
    for name, tensor in tensors.items():
        if type_ not in KEPT or len(tensor.shape) < 2:
            assert tensor.blocks is None, name
            continue
        blocks = read_finite_blocks(tensor)
        assert (blocks.format, blocks.shifts is not None) == tensor.blocks.kind
        assert blocks.shape == tensor.shape
        assert_same_bits(blocks.dequantised(), tensor.read())


def test_parts_of_different_kinds_have_no_blocks_together(tmp_path):
    model = tiny_model("llama")
    name = "blk.1.attn_v.weight"
    other = gguf.quants.quantize(
        model.state_dict()["model.layers.1.self_attn.v_proj.weight"].numpy(), Type.Q8_0
    )
    write_gguf(tmp_path / "m.gguf", model, matrices=Type.Q4_0, skip=(name,), extra={name: _typed(other)})
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert tensors["blocks.1.attention.qkv.weight"].blocks is None
    assert tensors["blocks.0.attention.qkv.weight"].blocks is not None


class _Typed(np.ndarray):
    """Bytes of a quantised tensor, which remember their type."""


def _typed(data: np.ndarray) -> np.ndarray:
    typed = np.ascontiguousarray(data).view(_Typed)
    typed.type_ = Type.Q8_0
    return typed


@pytest.mark.parametrize("at", [0, 2])
def test_a_block_that_is_not_finite_is_named(tmp_path, at):
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), matrices=Type.Q4_1)
    tensor = read_gguf(tmp_path / "m.gguf").tensors["blocks.0.mlp.down.weight"]
    file = (tmp_path / "m.gguf").read_bytes()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    [found] = [t for t in reader.tensors if t.name == "blk.0.ffn_down.weight"]
    broken = bytearray(file)
    broken[found.data_offset + at : found.data_offset + at + 2] = np.array([np.inf], np.float16).tobytes()
    del reader, found
    (tmp_path / "m.gguf").write_bytes(broken)
    with pytest.raises(
        CheckpointError, match=r"tensor blk\.0\.ffn_down\.weight holds a value that is not finite"
    ):
        read_finite_blocks(tensor)


@pytest.mark.slow
def test_the_blocks_of_smollm2_are_exact():
    tensors = open_checkpoint(str(real_models.smollm2())).tensors
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}
    assert tensors["embed.weight"].blocks.kind == (BlockFormat(bits=8), False)
    for name, tensor in matrices.items():
        if name != "embed.weight":
            assert tensor.blocks.kind == (BlockFormat(bits=4, zero_points=True), True), name
        assert_same_bits(read_finite_blocks(tensor).dequantised(), tensor.read())

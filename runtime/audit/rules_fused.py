"""Shapes of ONNX Runtime's own operators and of LSTM. They trust what they are given, so that every dimension is held."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import Call, ContractError, Made, show, want_rank, want_shape
from .dims import is_at_least

_GATES = 4


def block_product(call: Call) -> Sequence[Made]:
    """MatMulNBits: x (..., K) times a matrix (N, K) in blocks of codes."""
    x, codes, scales, zeros, groups, bias = (call.get(index) for index in range(6))
    assert x is not None
    assert codes is not None
    assert scales is not None
    K, N, bits, block = (call.attributes[name] for name in ("K", "N", "bits", "block_size"))
    if K % block or not x.shape or x.shape[-1] != K:
        raise ContractError(
            f"x {show(x.shape)} and K = {K} in blocks of {block}, wanted whole blocks of its last axis"
        )
    n_blocks = K // block
    want_shape(codes, "codes", (N, n_blocks, block * bits // 8))
    if scales.shape != (N * n_blocks,):
        want_shape(scales, "scales", (N, n_blocks))
    if zeros is not None:
        packed = -(-n_blocks * bits // 8)
        if zeros.shape != (N * packed,):
            want_shape(zeros, "zeros", (N, packed))
    if groups is not None:
        raise ContractError("an input g_idx, wanted none")
    if bias is not None:
        want_shape(bias, "bias", (N,))
    return [Made((*x.shape[:-1], N))]


def block_rows(call: Call) -> Sequence[Made]:
    """GatherBlockQuantized: rows of a table (V, D) in blocks of codes."""
    codes, indices, scales, zeros = (call.get(index) for index in range(4))
    assert codes is not None
    assert indices is not None
    assert scales is not None
    bits, block = call.attributes["bits"], call.attributes["block_size"]
    rows, size = want_rank(codes, "codes", 2)
    if not isinstance(rows, int) or not isinstance(size, int) or size * 8 // bits % block:
        raise ContractError(f"codes {show(codes.shape)} in blocks of {block}, wanted whole blocks")
    width = size * 8 // bits
    want_shape(scales, "scales", (rows, width // block))
    if zeros is not None:
        want_shape(zeros, "zeros", (rows, -(-(width // block) * bits // 8)))
    return [Made((*indices.shape, width))]


def cached_attention(call: Call) -> Sequence[Made]:
    """GroupQueryAttention over a cache of fixed capacity. Of what hangs on data it checks seqlens_k itself (1.31)."""
    H, H_kv = call.attributes["num_heads"], call.attributes["kv_num_heads"]
    query, key, value, past_key, past_value, seqlens_k, total = (call.get(index) for index in range(7))
    assert query is not None
    assert past_key is not None
    assert past_value is not None
    assert seqlens_k is not None
    assert total is not None
    B, T, width = want_rank(query, "query", 3)
    if H % H_kv:
        raise ContractError(f"{H} heads over {H_kv}, wanted a multiple")
    heads = H + 2 * H_kv if key is None else H
    if (
        not isinstance(width, int)
        or width % heads
        or (width // heads) % 8
        or not width
        or B is None
        or T is None
    ):
        raise ContractError(
            f"query {show(query.shape)} for {heads} heads, wanted a multiple of 8 numbers in each"
        )
    D = width // heads
    if (key is None) != (value is None):
        raise ContractError("key or value is absent, wanted both or none")
    for name, part in (("key", key), ("value", value)):
        if part is not None:
            want_shape(part, name, (B, T, H_kv * D))
    capacity = want_rank(past_key, "past_key", 4)[2]
    want_shape(past_key, "past_key", (B, H_kv, capacity, D))
    want_shape(past_value, "past_value", (B, H_kv, capacity, D))
    if past_key.dtype != past_value.dtype:
        raise ContractError(f"past_value is {past_value.dtype}, wanted {past_key.dtype} as past_key")
    want_shape(seqlens_k, "seqlens_k", (B,))
    want_shape(total, "total_sequence_length", () if total.shape == () else (1,))
    _check_rotary(call, D)
    _check_scales(call, H_kv, D, past_key.dtype, query.dtype)
    for index in (9, 10, 11):  # position_ids, attention_bias, head_sink
        if call.get(index) is not None:
            raise ContractError(f"input {index}, wanted none there")
    return [Made((B, T, H * D)), Made(past_key.shape), Made(past_value.shape)]


def _check_rotary(call: Call, D: int) -> None:
    cos, sin = call.get(7), call.get(8)
    if not call.attributes["do_rotary"]:
        if cos is not None or sin is not None:
            raise ContractError("cos or sin without do_rotary, wanted none")
        return
    if cos is None or sin is None:
        raise ContractError("do_rotary without cos and sin, wanted both")
    rows, half = want_rank(cos, "cos", 2)
    if not isinstance(rows, int) or not isinstance(half, int) or half % 8 or not 0 < 2 * half <= D:
        raise ContractError(
            f"cos has the shape {show(cos.shape)} for heads of {D}, wanted 8 n columns, at most {D // 2}"
        )
    want_shape(sin, "sin", cos.shape)


def _check_scales(call: Call, H_kv: int, D: int, cache: str, computed: str) -> None:
    """A cache of int8 has a scale for each channel, another has none."""
    names = ("k_scale", "v_scale")
    is_int8 = cache == "int8"
    rounded = (b"PER_CHANNEL", b"PER_CHANNEL", 8) if is_int8 else (None, None, None)
    kinds = tuple(call.attributes[name] for name in ("k_quant_type", "v_quant_type", "kv_cache_bit_width"))
    if kinds != rounded:
        raise ContractError(
            f"a cache of {cache} with k_quant_type, v_quant_type, kv_cache_bit_width = {kinds}"
        )
    if not is_int8 and cache != computed:
        raise ContractError(f"a cache of {cache}, wanted {computed} as the query")
    for name, scale in zip(names, (call.get(12), call.get(13)), strict=True):
        if (scale is not None) != is_int8:
            raise ContractError(f"{name} is {'there' if scale else 'absent'} for a cache of {cache}")
        if scale is not None:
            want_shape(scale, name, (1, H_kv, 1, D))


def recurrent(call: Call) -> Sequence[Made]:
    """LSTM, forwards: with no steps it leaves the state unwritten, and no rows end the process (1.31)."""
    x, w, r, bias, lengths, hidden, cell = (call.get(index) for index in range(7))
    assert x is not None
    assert w is not None
    assert r is not None
    T, B, width = want_rank(x, "x", 3)
    N = call.attributes["hidden_size"]
    if not (is_at_least(T, 1) and is_at_least(B, 1)):
        raise ContractError(f"x has the shape {show(x.shape)}, wanted a step and a row or more")
    if not isinstance(width, int) or width < 1:
        raise ContractError(f"x has the shape {show(x.shape)}, wanted a width that is known")
    want_shape(w, "W", (1, _GATES * N, width))
    want_shape(r, "R", (1, _GATES * N, N))
    if bias is not None:
        want_shape(bias, "B", (1, 2 * _GATES * N))
    if lengths is not None:
        want_shape(lengths, "sequence_lens", (B,))
    for name, state in (("initial_h", hidden), ("initial_c", cell)):
        if state is not None:
            want_shape(state, name, (1, B, N))
    return [Made((T, 1, B, N)), Made((1, B, N)), Made((1, B, N))]

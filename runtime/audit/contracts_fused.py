"""The part of the table whose kernels trust what they are given: ONNX Runtime's own operators, and LSTM."""

from __future__ import annotations

from . import rules_fused as fused
from .contract import Attribute, Contract, contract, number, one_of, whole

MICROSOFT = "com.microsoft."
SIDE = 2**20  # of an axis or a size in an attribute: none of ours comes near
_FLAG0 = whole(0, 1, 0)

FUSED: dict[str, list[Contract]] = {
    MICROSOFT + "MatMulNBits": [
        contract(
            "x:F codes!:uint8 scales!:F zeros?!:uint8 g_idx?!:int32 bias?!:F -> y:F",
            fused.block_product,
            {
                "K": whole(1, SIDE),
                "N": whole(1, SIDE),
                "bits": one_of(4, 8),
                "block_size": one_of(16, 32, 64, 128),
                "accuracy_level": one_of(0, 1, 4, default=0),
            },
        )
    ],
    MICROSOFT + "GatherBlockQuantized": [
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
    MICROSOFT + "GroupQueryAttention": [
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
                "hidden_size": whole(1, SIDE),
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

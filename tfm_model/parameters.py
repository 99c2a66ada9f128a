"""Finds the parameters of the decoder among the tensors of a checkpoint, whatever their file calls them.

Queries, keys and values become one matrix, gate and up another: fewer, larger products run faster. Every
tensor must be there, have the shape that the config says, and be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .checkpoint import CheckpointError, LazyTensor, concat_rows
from .config import ModelConfig
from .values import shown

# What a checkpoint calls each part of the model; {} is the layer. `.weight` and `.bias` follow.
HUGGINGFACE_NAMES = {
    "embed": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "out": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
GGUF_NAMES = {
    "embed": "token_embd",
    "attention_norm": "blk.{}.attn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "out": "blk.{}.attn_output",
    "mlp_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "norm": "output_norm",
    "head": "output",
}


def decoder_parameters(
    config: ModelConfig, stored: Mapping[str, LazyTensor], names: Mapping[str, str]
) -> dict[str, LazyTensor]:
    """The tensors by the parameter names of `Transformer`, in the order of their use."""
    source = _Source(stored, names)
    parameters = {"embed.weight": source.take("embed", (config.vocab_size, config.width))}
    for layer in range(config.n_layers):
        for name, tensor in _block(config, source, layer).items():
            parameters[f"blocks.{layer}.{name}"] = tensor
    parameters["norm.weight"] = source.take("norm", (config.width,))
    if not config.head.tied:
        parameters["head.weight"] = source.take("head", (config.vocab_size, config.width))
    source.expect_all_taken()
    return parameters


def _block(config: ModelConfig, source: _Source, layer: int) -> dict[str, LazyTensor]:
    attention, mlp, width = config.attention, config.mlp, config.width
    assert mlp is not None
    D, m = attention.head_dim, mlp.hidden
    qkv = {"q": attention.q_size, "k": attention.kv_size, "v": attention.kv_size}
    up = {"gate": m, "up": m} if mlp.gated else {"up": m}
    tensors = {
        "attention_norm.weight": source.take("attention_norm", (width,), layer),
        "attention.qkv.weight": source.take_rows(qkv, (width,), layer),
        "attention.out.weight": source.take("out", (width, attention.q_size), layer),
        "mlp_norm.weight": source.take("mlp_norm", (width,), layer),
        "mlp.up.weight": source.take_rows(up, (width,), layer),
        "mlp.down.weight": source.take("down", (width, m), layer),
    }
    if attention.qk_norm is not None:
        tensors["attention.q_norm.weight"] = source.take("q_norm", (D,), layer)
        tensors["attention.k_norm.weight"] = source.take("k_norm", (D,), layer)
    if attention.qkv_bias:
        tensors["attention.qkv.bias"] = source.take_rows(qkv, (), layer, "bias")
    if attention.out_bias:
        tensors["attention.out.bias"] = source.take("out", (width,), layer, "bias")
    if mlp.bias:
        tensors["mlp.up.bias"] = source.take_rows(up, (), layer, "bias")
        tensors["mlp.down.bias"] = source.take("down", (width,), layer, "bias")
    return tensors


@dataclass(frozen=True, slots=True)
class _Source:
    """The stored tensors, which remember who was taken."""

    stored: Mapping[str, LazyTensor]
    names: Mapping[str, str]
    taken: set[str] = field(default_factory=set)

    def take(self, role: str, shape: tuple[int, ...], layer: int = 0, kind: str = "weight") -> LazyTensor:
        name = f"{self.names[role].format(layer)}.{kind}"
        tensor = self.stored.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name} is missing, wanted one of shape {list(shape)}")
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, wanted {list(shape)}")
        self.taken.add(name)
        return tensor

    def take_rows(
        self, rows: Mapping[str, int], columns: tuple[int, ...], layer: int, kind: str = "weight"
    ) -> LazyTensor:
        """The tensors of these roles below each other."""
        parts = [self.take(role, (n_rows, *columns), layer, kind) for role, n_rows in rows.items()]
        return parts[0] if len(parts) == 1 else concat_rows(" + ".join(part.name for part in parts), parts)

    def expect_all_taken(self) -> None:
        extra = [name for name in self.stored if name not in self.taken]
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise CheckpointError(
                f"tensor {shown(extra[0])}{more} has no place in this model; its config.json may be of another one"
            )

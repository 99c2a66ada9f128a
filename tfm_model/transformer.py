"""The model: one definition, whose settings are every transformer and LSTM of the family.

It keeps no state: keys and values, or a recurrent state, are arguments and results, described by `state_spec`.

    inputs ─ embedding, positions ─ block ─ block ─ ... ─ norm ─ pooling ─ head
                                      │  ╲
                             past state, present state
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention_config import AttentionConfig
from .config import ModelConfig
from .heads import Head
from .inputs import Embedding
from .layers import AblatedLstm, Attention, CrossAttention, Lstm, Mixed, Mlp, Norm, Reads, Rotary
from .rotary import dynamic_rotary, rotary_tables
from .state import StateSpec, model_state


class Outputs(NamedTuple):
    main: Tensor  # what the head gives
    state: list[Tensor]  # for the next call
    maps: dict[str, Tensor]  # attention weights of the chosen layers, by output name


class Block(nn.Module):
    """Mix, look at the encoder if there is one, think; each with a norm and a residual connection. An LSTM only mixes."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, shows = config.width, layer in config.attention_outputs
        self.is_post = config.norm_order == "post"
        self.is_plain = not isinstance(config.mixer, AttentionConfig)
        self.cross, self.mlp = None, None
        if not isinstance(config.mixer, AttentionConfig):
            lstm = config.mixer
            self.attention: nn.Module = (
                AblatedLstm(width, lstm, shows=shows) if lstm.ablated else Lstm(width, lstm)
            )
            return
        assert config.norm is not None
        self.attention_norm = Norm(width, config.norm)
        self.attention = Attention(
            width, config.mixer, layer, config.window(layer), causal=config.causal, shows=shows
        )
        if config.encoder is not None:
            self.cross_norm = Norm(width, config.norm)
            self.cross = CrossAttention(width, config.encoder.width, config.mixer, shows=shows)
        if config.mlp is not None:
            self.mlp_norm = Norm(width, config.norm)
            self.mlp = Mlp(width, config.mlp)

    def forward(
        self, x: Tensor, reads: Reads, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """x, the new state, and the weights of the attention to itself and to the encoder."""
        if self.is_plain:
            mixed: Mixed = self.attention(x, reads, state)
            return mixed.y, mixed.state, [mixed.weights]
        own = state[:-2] if self.cross is not None else state
        mixed = self.attention(self._before(self.attention_norm, x), reads, own)
        x = self._after(self.attention_norm, x + mixed.y)
        weights = [mixed.weights]
        if self.cross is not None:
            crossed = self.cross(self._before(self.cross_norm, x), reads, state[-2:])
            x = self._after(self.cross_norm, x + crossed.y)
            weights.append(crossed.weights)
        if self.mlp is not None:
            x = self._after(self.mlp_norm, x + self.mlp(self._before(self.mlp_norm, x)))
        return x, mixed.state, weights

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = x if self.is_post else norm(x)
        return y

    def _after(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x) if self.is_post else x
        return y


class Transformer(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Transformer(config.encoder) if config.encoder is not None else None
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = Norm(config.width, config.norm) if config.last_norm and config.norm is not None else None
        self.head = Head(config)
        if config.head.tied:
            self.head.weight = self.embed.weight
        if self.has_rotary_tables:
            self.set_rotary_tables(torch.get_default_dtype())

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_context(self) -> int:
        return self.config.context

    def state_spec(self) -> StateSpec:
        """The tensors that `forward` takes as `state`, in order; it returns all but the fixed ones."""
        return model_state(self.config)

    # --- the three ways to run it ------------------------------------------------------------------------

    def forward(
        self,
        inputs: Tensor,  # ids (B, T) or vectors (B, T, F)
        attention_mask: Tensor,  # (B, P+T)
        position_ids: Tensor,  # (B, T)
        state: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One step of a decoder; see protocol.py."""
        outputs = self.step(inputs, attention_mask, position_ids, state, encoder_attention_mask)
        return outputs.main, outputs.state

    def step(
        self,
        inputs: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        state: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
    ) -> Outputs:
        x, present, maps = self.body(inputs, attention_mask, position_ids, state, encoder_attention_mask)
        return Outputs(self.output(x, attention_mask), present, maps)

    def body(
        self,
        inputs: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        state: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
    ) -> Outputs:
        """All of a step but its head."""
        reads = Reads(attention_mask, position_ids, self.rotary(position_ids), encoder_attention_mask)
        x = self.embedding(inputs, position_ids)
        per_layer = len(state) // len(self.blocks)
        present: list[Tensor] = []
        maps: dict[str, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            x, new, weights = block(x, reads, state[layer * per_layer : (layer + 1) * per_layer])
            present += new
            maps |= named_maps(layer, weights)
        return Outputs(x, present, maps)

    def encode(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Outputs:
        """All at once. An encoder-decoder's state is then the keys and values that its decoder will look at."""
        if self.encoder is not None:
            encoded = self.encoder.encode(inputs, attention_mask)
            maps = {f"encoder_{name}": weights for name, weights in encoded.maps.items()}
            narrow = encoded.main.to(next(self.parameters()).dtype)  # the head gives float32 or wider
            return Outputs(encoded.main, self.remember(narrow), maps)
        attention_mask = all_real(inputs) if attention_mask is None else attention_mask
        position_ids = None if attention_mask is None else positions(attention_mask)
        reads = Reads(attention_mask, position_ids, self.rotary(position_ids))
        x = self.embedding(inputs, position_ids)
        state = self.encoder_state(x)
        maps = {}
        for layer, block in enumerate(self.blocks):
            x, _, weights = block(x, reads, state)
            maps |= named_maps(layer, weights)
        return Outputs(self.output(x, attention_mask), [], maps)

    def apply_to(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Outputs:
        """From nothing, whatever the kind: what training calls. Masks default to all real."""
        attention_mask = all_real(inputs) if attention_mask is None else attention_mask
        if self.config.kind == "encoder":
            return self.encode(inputs, attention_mask)
        assert attention_mask is not None
        fixed: list[Tensor] = []
        if source is not None:
            source_mask = all_real(source) if source_mask is None else source_mask
            fixed = self.encode(source, source_mask).state
        state = self.empty_state(len(inputs), fixed)
        return self.step(inputs, attention_mask, positions(attention_mask), state, source_mask)

    # --- its parts ---------------------------------------------------------------------------------------

    def embedding(self, inputs: Tensor, position_ids: Tensor | None) -> Tensor:
        x: Tensor = self.embed(inputs, position_ids)
        return x

    def remember(self, encoded: Tensor) -> list[Tensor]:
        """The decoder's keys and values of the encoder's output, of all layers."""
        return [part for block in self.blocks for part in block.cross.remember(encoded)]  # type: ignore[union-attr,operator]

    def output(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        main: Tensor = self.head(x if self.norm is None else self.norm(x), attention_mask)
        return main

    def logits(self, x: Tensor) -> Tensor:
        """Of a head that looks at each element alone."""
        return self.output(x, None)

    @property
    def has_rotary_tables(self) -> bool:
        mixer = self.config.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.rotary is None:
            return False
        return mixer.rotary.scaling is None or mixer.rotary.scaling.kind != "dynamic"

    def set_rotary_tables(self, dtype: torch.dtype) -> None:
        """Round the tables to the dtype once, from float64; `.to(dtype)` would round what is rounded already."""
        assert self.config.attention.rotary is not None
        cos, sin = rotary_tables(self.config.attention.rotary, self.config.context)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def rotary(self, position_ids: Tensor | None) -> Rotary:
        mixer = self.config.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.rotary is None or position_ids is None:
            return None
        if self.has_rotary_tables:
            return self.cos, self.sin
        return dynamic_rotary(mixer.rotary, position_ids, next(self.parameters()).dtype)

    def empty_state(self, batch: int, fixed: list[Tensor]) -> list[Tensor]:
        """Before the first element; `fixed` are the encoder's keys and values, in order."""
        rest = iter(fixed)
        like = next(self.parameters())
        dims = {"batch_size": batch, "past_sequence_length": 0}
        return [
            next(rest)
            if spec.growth == "fixed"
            else torch.zeros(
                [dims[dim] if isinstance(dim, str) else dim for dim in spec.shape],
                dtype=torch.promote_types(like.dtype, torch.float32) if spec.wide else like.dtype,
                device=like.device,
            )
            for spec in self.state_spec()
        ]

    def encoder_state(self, x: Tensor) -> list[Tensor]:
        """An LSTM under a pooled head starts from zero; attention over the whole needs nothing."""
        if isinstance(self.config.mixer, AttentionConfig):
            return []
        return [x[:, 0] * 0.0 for _ in range(1 if self.config.mixer.ablated else 2)]


def all_real(inputs: Tensor) -> Tensor | None:
    """The mask of a batch without pads; images have none."""
    if inputs.dim() == 4:
        return None
    return torch.ones(inputs.shape[:2], dtype=torch.int64, device=inputs.device)


def positions(attention_mask: Tensor) -> Tensor:
    """How many real elements stand before each in its row."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def named_maps(layer: int, weights: list[Tensor | None]) -> dict[str, Tensor]:
    names = (f"attentions.{layer}", f"cross_attentions.{layer}")
    return {name: part for name, part in zip(names, weights, strict=False) if part is not None}

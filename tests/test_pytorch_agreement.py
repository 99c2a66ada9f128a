"""PyTorch's own modules, with their weights copied into ours, give the same numbers; in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_bundles import default_dtype, random_model
from torch import Tensor, nn

from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    LstmConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    TokenInputs,
    VectorInputs,
)
from tfmx.tfm_model.layers import Attention, CrossAttention, Lstm, Norm, Reads
from tfmx.tfm_model.transformer import Block, Transformer

FAR = 1e-12  # float64: what reordered sums may differ by
WIDTH, H, HIDDEN, B, T, S = 12, 3, 20, 2, 7, 5
EPS = 1e-3
HEADS = AttentionConfig(n_heads=H, n_kv_heads=H, head_dim=WIDTH // H, qkv_bias=True, out_bias=True)
ENCODER = ModelConfig(
    inputs=VectorInputs(features=WIDTH, projected=False),
    width=WIDTH,
    n_layers=2,
    context=64,
    mixer=HEADS,
    norm=NormConfig(kind="layer", eps=EPS, bias=True),
    mlp=MlpConfig(hidden=HIDDEN, activation="relu", gated=False, bias=True),
    last_norm=False,
    causal=False,
    head=HeadConfig(kind="hidden"),
)
REAL = torch.tensor([[1] * T, [1, 1, 1, 1, 0, 0, 0]])
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)  # True is hidden, to PyTorch


@pytest.fixture(autouse=True)
def _double():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread costs more than it does
    with torch.random.fork_rng(), torch.no_grad(), default_dtype(torch.float64):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def randomized(module: nn.Module) -> nn.Module:
    """New biases are zero and new norms one: of those, a fault would not be seen."""
    for parameter in module.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape) + (1.0 if parameter.dim() == 1 else 0.0))
    return module.eval()


def same(ours: Tensor, theirs: Tensor, real: Tensor | None = None) -> None:
    assert ours.shape == theirs.shape
    rows = torch.ones(ours.shape[:2]).bool() if real is None else real.bool()
    assert float((ours - theirs)[rows].abs().max()) < FAR


def copied_norm(ours: Norm, theirs: nn.LayerNorm) -> None:
    ours.weight.copy_(theirs.weight)
    ours.bias.copy_(theirs.bias)


def copied_attention(ours: Attention | CrossAttention, theirs: nn.MultiheadAttention) -> None:
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    if isinstance(ours, Attention):
        ours.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
        return
    parts = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
    for part, (weight, bias) in zip((ours.query, ours.key, ours.value), parts, strict=True):
        part.load_state_dict({"weight": weight, "bias": bias})


def copied_block(ours: Block, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
    copied_attention(ours.attention, theirs.self_attn)
    copied_norm(ours.attention_norm, theirs.norm1)
    last = theirs.norm2
    if isinstance(theirs, nn.TransformerDecoderLayer):
        copied_attention(ours.cross, theirs.multihead_attn)
        copied_norm(ours.cross_norm, theirs.norm2)
        last = theirs.norm3
    copied_norm(ours.mlp_norm, last)
    ours.mlp.up.load_state_dict(theirs.linear1.state_dict())
    ours.mlp.down.load_state_dict(theirs.linear2.state_dict())


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1, 10.0])
def test_a_layer_norm_has_the_population_variance_and_its_epsilon(eps: float) -> None:
    theirs = randomized(nn.LayerNorm(WIDTH, eps=eps))
    ours = Norm(WIDTH, NormConfig(kind="layer", eps=eps, bias=True))
    copied_norm(ours, theirs)
    x = 0.3 * torch.randn(B, T, WIDTH) + 2
    same(ours(x), theirs(x))


@pytest.mark.parametrize("eps", [1e-12, 0.1])
def test_an_rms_norm_is_pytorchs(eps: float) -> None:
    theirs = randomized(nn.RMSNorm(WIDTH, eps=eps))
    ours = Norm(WIDTH, NormConfig(kind="rms", eps=eps))
    ours.weight.copy_(theirs.weight)
    x = 0.3 * torch.randn(B, T, WIDTH) + 2
    same(ours(x), theirs(x))


@pytest.mark.parametrize("combination", ["concat", "sum"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_pytorchs_and_so_are_its_weights(causal: bool, combination: str) -> None:
    theirs = randomized(nn.MultiheadAttention(WIDTH, H, batch_first=True))
    config = replace(HEADS, combination=combination)
    ours = Attention(WIDTH, config, 0, None, causal=causal, shows=True)
    copied_attention(ours, theirs)
    x = torch.randn(B, T, WIDTH)
    mixed = ours(x, Reads(REAL, REAL.cumsum(1) - 1), [])
    hidden = CAUSAL if causal else None
    y, weights = theirs(x, x, x, key_padding_mask=REAL == 0, attn_mask=hidden, average_attn_weights=False)
    same(mixed.y, y)
    same(mixed.weights.movedim(1, 2), weights.movedim(1, 2))
    assert float((mixed.weights.sum(-1) - 1).abs().max()) < FAR


def test_attention_to_another_sequence_of_another_width_is_pytorchs() -> None:
    theirs = randomized(nn.MultiheadAttention(WIDTH, H, kdim=8, vdim=8, batch_first=True))
    ours = CrossAttention(WIDTH, 8, HEADS, shows=True)
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    for part, weight, bias in zip(
        (ours.query, ours.key, ours.value), weights, theirs.in_proj_bias.chunk(3), strict=True
    ):
        part.load_state_dict({"weight": weight, "bias": bias})
    x, source = torch.randn(B, T, WIDTH), torch.randn(B, S, 8)
    mask = torch.tensor([[1] * S, [0, 1, 1, 0, 1]])
    mixed = ours(x, Reads(None, None, None, mask), ours.remember(source))
    y, shown = theirs(x, source, source, key_padding_mask=mask == 0, average_attn_weights=False)
    same(mixed.y, y)
    same(mixed.weights.movedim(1, 2), shown.movedim(1, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("order", ["post", "pre"])
def test_encoder_layers_are_pytorchs(order: str, activation: str, causal: bool) -> None:
    theirs = randomized(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                WIDTH, H, HIDDEN, 0.0, activation, EPS, batch_first=True, norm_first=order == "pre"
            ),
            2,
            enable_nested_tensor=False,
        )
    )
    ours = random_model(
        replace(ENCODER, norm_order=order, mlp=replace(ENCODER.mlp, activation=activation), causal=causal)
    )
    for mine, other in zip(ours.blocks, theirs.layers, strict=True):
        copied_block(mine, other)
    x = torch.randn(B, T, WIDTH)
    hidden = {"mask": CAUSAL} if causal else {}
    same(ours.apply_to(x, REAL).main, theirs(x, src_key_padding_mask=REAL == 0, **hidden), REAL)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # nn.Transformer has no way to turn it off
@pytest.mark.parametrize("order", ["post", "pre"])
def test_an_encoder_decoder_is_pytorchs(order: str) -> None:
    """nn.Transformer ends both sides with a norm, in either order."""
    theirs = randomized(
        nn.Transformer(
            WIDTH,
            H,
            2,
            3,
            HIDDEN,
            0.0,
            "relu",
            layer_norm_eps=EPS,
            batch_first=True,
            norm_first=order == "pre",
        )
    )
    inputs = TokenInputs(vocab_size=WIDTH)
    side = replace(ENCODER, norm_order=order, last_norm=True)
    ours = random_model(
        replace(side, inputs=inputs, n_layers=3, causal=True, head=HeadConfig(), encoder=side)
    )
    ours.embed.weight.copy_(torch.randn(WIDTH, WIDTH))
    ours.head.weight.copy_(torch.eye(WIDTH))  # what the decoder gives, as it is
    copy_sides(ours, theirs)
    source, ids = torch.randn(B, S, WIDTH), torch.randint(0, WIDTH, (B, T))
    source_mask = torch.tensor([[1] * S, [1, 1, 0, 1, 0]])
    wanted = theirs(
        source, ours.embed.weight[ids], tgt_mask=CAUSAL, src_key_padding_mask=source_mask == 0,
        memory_key_padding_mask=source_mask == 0, tgt_key_padding_mask=REAL == 0,
    )  # fmt: skip
    same(ours.apply_to(ids, REAL, source, source_mask).main, wanted, REAL)


def copy_sides(ours: Transformer, theirs: nn.Transformer) -> None:
    for mine, other in ((ours.encoder, theirs.encoder), (ours, theirs.decoder)):
        copied_norm(mine.norm, other.norm)
        for mine_block, other_block in zip(mine.blocks, other.layers, strict=True):
            copied_block(mine_block, other_block)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_an_lstm_is_pytorchs(layers: int, bias: bool) -> None:
    theirs = randomized(nn.LSTM(WIDTH, WIDTH, layers, bias=bias, batch_first=True))
    config = replace(ENCODER, mixer=LstmConfig(bias=bias), n_layers=layers, norm=None, mlp=None, causal=True)
    ours = random_model(config)
    for layer, block in enumerate(ours.blocks):
        copied_lstm(block.attention, theirs, layer, bias=bias)
    x, lengths = torch.randn(B, T, WIDTH), REAL.sum(1)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    rows, (hidden, cell) = theirs(packed)
    outputs = ours.apply_to(x, REAL)
    same(outputs.main, nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0], REAL)
    for layer in range(layers):
        same(outputs.state[2 * layer][None], hidden[layer][None])
        same(outputs.state[2 * layer + 1][None], cell[layer][None])


def copied_lstm(ours: Lstm, theirs: nn.LSTM, layer: int, *, bias: bool) -> None:
    """Theirs are in the order i, f, candidate, o; ours i, o, f, candidate."""

    def ordered(name: str) -> Tensor:
        i, f, candidate, o = getattr(theirs, f"{name}_l{layer}").chunk(4)
        return torch.cat((i, o, f, candidate))

    ours.input_weight.copy_(ordered("weight_ih"))
    ours.hidden_weight.copy_(ordered("weight_hh"))
    if bias:
        ours.bias.copy_(ordered("bias_ih") + ordered("bias_hh"))


def test_a_vision_transformers_patches_are_a_convolution() -> None:
    from tfmx.tfm_model.config import PatchInputs

    inputs = PatchInputs(channels=3, height=8, width=12, patch=4, bias=True)
    ours = random_model(replace(ENCODER, inputs=inputs, context=6))
    theirs = randomized(nn.Conv2d(3, WIDTH, 4, stride=4))
    ours.embed.project.weight.copy_(theirs.weight.flatten(1))
    ours.embed.project.bias.copy_(theirs.bias)
    images = torch.randn(B, 3, 8, 12)
    same(ours.embedding(images, None), theirs(images).flatten(2).transpose(1, 2))

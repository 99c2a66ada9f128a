"""The family against its formulas, written out as loops (naive_formulas.py), in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import naive_formulas as naive
import numpy as np
import pytest
import torch
from family_bundles import FAMILY, random_inputs, random_model
from torch import Tensor

from tfmx.tfm_model.config import (
    AttentionConfig,
    HeadConfig,
    LstmConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    PatchInputs,
    PositionConfig,
    RandomFeatureConfig,
    RelativeConfig,
    TokenInputs,
    VectorInputs,
)
from tfmx.tfm_model.inputs import Positions, sinusoids
from tfmx.tfm_model.layers import AblatedLstm, Linear, alibi_slopes, t5_buckets
from tfmx.tfm_model.recurrent_ops import recurrence, recurrence_weights
from tfmx.tfm_model.transformer import Transformer

FAR = 1e-11  # float64: what reordered sums may differ by
WIDTH, H, D, HIDDEN, T = 6, 3, 4, 10, 7
HEADS = AttentionConfig(n_heads=H, n_kv_heads=H, head_dim=D)
EPS = 0.03  # large, so that it is seen


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def block(attention: AttentionConfig = HEADS, **settings: object) -> Transformer:
    """One block over vectors; what it gives is the output."""
    config = ModelConfig(
        inputs=VectorInputs(features=WIDTH, projected=False),
        width=WIDTH,
        n_layers=1,
        context=64,
        mixer=attention,
        norm=NormConfig(kind="layer", eps=EPS, bias=True),
        mlp=MlpConfig(hidden=HIDDEN, activation="relu", gated=False),
        last_norm=False,
        causal=False,
        head=HeadConfig(kind="hidden"),
    )
    model = random_model(replace(config, **settings))
    for name, weight in model.named_parameters():
        if "qkv" in name or "relative" in name:
            weight.mul_(3)  # scores that are far from uniform
    return model


def elements(length: int = T) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(1, length, WIDTH, generator=draw, dtype=torch.float64)


def check(model: Transformer, x: Tensor, wanted: np.ndarray, far: float = FAR) -> None:
    got = model.apply_to(x).main[0].numpy()
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() < far


def bias_of(linear: Linear) -> np.ndarray:
    return np.zeros(linear.out_features) if linear.bias is None else linear.bias.numpy()


def heads_of(model: Transformer) -> list[naive.Head]:
    """One matrix for each head; biases become one more column, which `with_ones` meets."""
    attention = model.blocks[0].attention
    rows = np.concatenate((attention.qkv.weight.numpy(), bias_of(attention.qkv)[:, None]), axis=1)
    q, k, v = (part.reshape(H, D, -1) for part in np.split(rows, 3))
    out = attention.out.weight.numpy()  # (width, H D)
    back = [out[:, h * D : (h + 1) * D] for h in range(H)]
    return [naive.Head(*parts) for parts in zip(q, k, v, back, strict=True)]


def mixing(
    model: Transformer, distances: naive.Distances | None = None, scale: float | None = None
) -> Callable:
    """x → the sum over heads, with the output's bias."""
    heads, causal = heads_of(model), model.config.causal
    scale = 1 / math.sqrt(D) if scale is None else scale

    def mix(x: np.ndarray) -> np.ndarray:
        with_ones = np.concatenate((x, np.ones((len(x), 1))), axis=1)
        bare = [naive.Head(h.query, h.key, h.value, np.vstack((h.back, np.zeros(D)))) for h in heads]
        mixed = naive.attention(with_ones, bare, scale, causal=causal, distances=distances)
        return mixed[:, :-1] + bias_of(model.blocks[0].attention.out)

    return mix


def thinking(model: Transformer) -> Callable:
    mlp = model.blocks[0].mlp
    linears = [linear for linear in (mlp.up, mlp.middle, mlp.down) if linear is not None]
    layers = [(linear.weight.numpy(), bias_of(linear)) for linear in linears]
    return lambda x: naive.mlp(x, layers, mlp.config.activation)


def norms(model: Transformer) -> tuple[Callable, Callable]:
    def one(norm: torch.nn.Module) -> Callable:
        return lambda x: naive.layer_norm(x, norm.weight.numpy(), norm.bias.numpy(), EPS)

    return one(model.blocks[0].attention_norm), one(model.blocks[0].mlp_norm)


def naive_block(model: Transformer, x: Tensor, mix: Callable | None = None) -> np.ndarray:
    is_post = model.config.norm_order == "post"
    run = naive.post_norm_block if is_post else naive.pre_norm_block
    return run(x[0].numpy(), mix or mixing(model), thinking(model), norms(model))


# --- blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["post", "pre"])
def test_a_block_is_what_is_printed(order: str, bias: bool, causal: bool) -> None:
    mlp = MlpConfig(hidden=HIDDEN, activation="relu", gated=False, bias=bias)
    heads = replace(HEADS, qkv_bias=bias, out_bias=bias)
    model = block(heads, norm_order=order, mlp=mlp, causal=causal)
    check(model, elements(), naive_block(model, elements()))


@pytest.mark.parametrize("hidden_layers", [1, 2])
@pytest.mark.parametrize("activation", list(naive.ACTIVATIONS))
def test_an_mlp_has_one_or_two_hidden_layers_of_any_activation(activation: str, hidden_layers: int) -> None:
    mlp = MlpConfig(hidden=HIDDEN, activation=activation, gated=False, bias=True, hidden_layers=hidden_layers)
    model = block(mlp=mlp)
    check(model, elements(), naive_block(model, elements()))


@pytest.mark.parametrize(("scale", "naive_scale"), [(None, 0.5), (1.0, 1.0), (0.3, 0.3)])
def test_scores_are_divided_by_the_root_of_the_head_size_or_scaled_as_set(
    scale: float | None, naive_scale: float
) -> None:
    model = block(replace(HEADS, scale=scale))  # 1 / sqrt(4) is 0.5
    check(model, elements(), naive_block(model, elements(), mixing(model, scale=naive_scale)))


@pytest.mark.parametrize("similarity", ["raw", "symmetric"])
def test_raw_and_symmetric_similarities_are_what_they_say(similarity: str) -> None:
    heads = 1 if similarity == "raw" else H
    size = WIDTH if similarity == "raw" else D
    model = block(AttentionConfig(n_heads=heads, n_kv_heads=heads, head_dim=size, similarity=similarity))
    attention = model.blocks[0].attention
    rows, out = attention.qkv.weight.numpy(), attention.out.weight.numpy()
    shared = [np.eye(WIDTH)] if similarity == "raw" else list(rows[: H * D].reshape(H, D, WIDTH))
    values = rows[-heads * size :].reshape(heads, size, WIDTH)
    found = [naive.Head(u, u, values[h], out[:, h * size : (h + 1) * size]) for h, u in enumerate(shared)]
    mixed = lambda x: naive.attention(x, found, size**-0.5, causal=False)  # noqa: E731 - read where it stands
    check(model, elements(), naive_block(model, elements(), mixed))


def test_full_rank_values_are_summed_over_heads() -> None:
    model = block(replace(HEADS, full_rank_values=True, combination="sum"))
    rows = model.blocks[0].attention.qkv.weight.numpy()
    q, k = (part.reshape(H, D, WIDTH) for part in np.split(rows[: 2 * H * D], 2))
    v = rows[2 * H * D :].reshape(H, WIDTH, WIDTH)
    found = [naive.Head(q[h], k[h], v[h], np.eye(WIDTH)) for h in range(H)]
    check(
        model,
        elements(),
        naive_block(model, elements(), lambda x: naive.attention(x, found, 0.5, causal=False)),
    )


@pytest.mark.parametrize("out_bias", [False, True])
def test_the_sum_over_heads_is_the_concatenation(out_bias: bool) -> None:
    concat = block(replace(HEADS, out_bias=out_bias))
    summed = block(replace(HEADS, out_bias=out_bias, combination="sum"))
    summed.load_state_dict(concat.state_dict())
    check(summed, elements(), concat.apply_to(elements()).main[0].numpy())


def test_grouped_heads_are_heads_that_share_keys_and_values() -> None:
    grouped = block(AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=D))
    plain = block(AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=D))
    weights = grouped.state_dict()
    q, k, v = weights["blocks.0.attention.qkv.weight"].split([4 * D, 2 * D, 2 * D])
    twice = [part.reshape(2, D, WIDTH).repeat_interleave(2, dim=0).flatten(0, 1) for part in (k, v)]
    plain.load_state_dict(weights | {"blocks.0.attention.qkv.weight": torch.cat((q, *twice))})
    check(plain, elements(), grouped.apply_to(elements()).main[0].numpy())


# --- relative positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_shaws_vectors_are_added_to_keys_and_values_by_clipped_distance(causal: bool) -> None:
    model = block(replace(HEADS, relative=RelativeConfig(kind="shaw", max_distance=2)), causal=causal)
    relative = model.blocks[0].attention.relative
    keys, values = relative.keys.numpy(), relative.values.numpy()
    distances = naive.Distances(
        key=lambda d: keys[2 + max(-2, min(2, d))], value=lambda d: values[2 + max(-2, min(2, d))]
    )
    check(model, elements(), naive_block(model, elements(), mixing(model, distances)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (16, 40), (8, 20), (4, 3), (64, 1000)])
def test_t5_buckets_are_those_of_transformers(causal: bool, buckets: int, most: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    ours = t5_buckets(RelativeConfig(kind="t5", max_distance=most, buckets=buckets), causal=causal)
    distances = torch.arange(-most, most + 1)
    theirs = T5Attention._relative_position_bucket(distances, not causal, buckets, most)
    assert ours.tolist() == theirs.tolist()
    far = torch.tensor([-10 * most, 10 * most])  # count as the last of the table
    ends = T5Attention._relative_position_bucket(far, not causal, buckets, most)
    assert [int(ours[0]), int(ours[-1])] == ends.tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_t5_biases_are_added_to_scores_by_bucket(causal: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    config = RelativeConfig(kind="t5", max_distance=9, buckets=8)
    model = block(replace(HEADS, relative=config), causal=causal)
    biases = model.blocks[0].attention.relative.bias.numpy()

    def bias(head: int, distance: int) -> float:
        bucket = T5Attention._relative_position_bucket(torch.tensor([distance]), not causal, 8, 9)
        return float(biases[head, int(bucket)])

    x = elements(15)
    check(model, x, naive_block(model, x, mixing(model, naive.Distances(bias=bias))))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # (heads, 1, 2): slope times 0 and 1
    assert torch.allclose(alibi_slopes(heads), theirs[:, 0, 1], rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_takes_a_slope_times_the_distance_off_each_score(causal: bool) -> None:
    model = block(replace(HEADS, relative=RelativeConfig(kind="alibi")), causal=causal)
    slopes = [2**-4, 2**-8, 2**-2]  # of 3 heads: those of 2, then the first of 4 (Press et al. 2022)
    distances = naive.Distances(bias=lambda head, distance: -slopes[head] * abs(distance))
    check(model, elements(), naive_block(model, elements(), mixing(model, distances)))


# --- positions of the input ------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "base"), [(6, 10000.0), (10, 7.0), (2, 10000.0)])
def test_sinusoids_are_what_is_printed(width: int, base: float) -> None:
    assert np.abs(sinusoids(50, width, base).numpy() - naive.sinusoids(50, width, base)).max() < FAR


def positions_of(kind: str, features: int | None = None) -> tuple[Transformer, Positions]:
    model = block(positions=PositionConfig(kind=kind, features=features, base=50.0), context=T)
    return model, model.embed.positions


def embedded(model: Transformer, x: Tensor, places: list[int]) -> np.ndarray:
    return model.embedding(x, torch.tensor([places]))[0].numpy()


PLACES = [0, 4, 4, 6, 1, 2, 5]


def test_joint_features_are_what_is_printed() -> None:
    model, p = positions_of("joint", 9)
    w_x, w_e, w_z = p.features.weight.numpy(), p.weight.numpy(), p.mix.weight.numpy()
    one_hot = np.eye(T)
    wanted = [
        w_z @ naive.ACTIVATIONS["relu"](w_x @ x + w_e.T @ one_hot[k])
        for x, k in zip(elements()[0].numpy(), PLACES, strict=True)
    ]
    assert np.abs(embedded(model, elements(), PLACES) - wanted).max() < FAR


def test_separate_features_are_what_is_printed() -> None:
    model, p = positions_of("separate", 9)
    w_x, w_e = p.features.weight.numpy(), p.weight.numpy()
    w_zx, w_ze, relu = p.mix.weight.numpy(), p.mix_positions.weight.numpy(), naive.ACTIVATIONS["relu"]
    one_hot = np.eye(T)
    wanted = [
        w_zx @ relu(w_x @ x) + w_ze @ relu(w_e.T @ one_hot[k])
        for x, k in zip(elements()[0].numpy(), PLACES, strict=True)
    ]
    assert np.abs(embedded(model, elements(), PLACES) - wanted).max() < FAR


@pytest.mark.parametrize("features", [None, 9])
def test_sinusoids_are_added_to_the_input_or_to_its_features(features: int | None) -> None:
    model, p = positions_of("sinusoidal", features)
    table, relu = naive.sinusoids(T, WIDTH, 50.0), naive.ACTIVATIONS["relu"]
    rows = elements()[0].numpy()
    if features is not None:
        rows = np.array([p.mix.weight.numpy() @ relu(p.features.weight.numpy() @ x) for x in rows])
    assert np.abs(embedded(model, elements(), PLACES) - (rows + table[PLACES])).max() < FAR


def test_a_one_hot_position_times_a_matrix_is_a_learned_position() -> None:
    learned, p = positions_of("learned")
    config = replace(learned.config, width=WIDTH + T, positions=PositionConfig(kind="one_hot"))
    one_hot = random_model(config)
    beside = embedded(one_hot, elements(), PLACES)  # (x, e_i)
    matrix = np.concatenate((np.eye(WIDTH), p.weight.numpy()))
    assert np.abs(beside @ matrix - embedded(learned, elements(), PLACES)).max() < FAR


def test_one_hot_positions_stand_beside_what_is_embedded() -> None:
    inputs = TokenInputs(vocab_size=11, scale=3.0)
    model = block(width=WIDTH + T, inputs=inputs, context=T, positions=PositionConfig(kind="one_hot"))
    ids = random_inputs(model.config, 1, T)
    wanted = np.concatenate((model.embed.weight.numpy()[ids[0]] * 3.0, np.eye(T)[PLACES]), axis=1)
    assert np.abs(embedded(model, ids, PLACES) - wanted).max() < FAR


def test_patches_are_cut_row_by_row_flattened_and_projected() -> None:
    inputs = PatchInputs(channels=2, height=4, width=6, patch=2, bias=True, class_token=True)
    model = block(inputs=inputs, context=7, positions=PositionConfig(kind="learned"))
    image = random_inputs(model.config, 1, 0)
    project, places = model.embed.project, model.embed.positions.weight.numpy()
    wanted = [model.embed.class_token.numpy() + places[0]]
    for row in range(2):
        for column in range(3):
            cut = image[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].numpy()
            flat = np.array([cut[c, y, x] for c in range(2) for y in range(2) for x in range(2)])
            wanted.append(project.weight.numpy() @ flat + project.bias.numpy() + places[len(wanted)])
    assert np.abs(model.embedding(image, None)[0].numpy() - wanted).max() < FAR


# --- random features -------------------------------------------------------------------------------------

SIZES = [64, 128, 256, 512, 1024, 2048, 4096]


def feature_model(unit: bool, causal: bool, features: int, seed: int, sigma: float = 1.0) -> Transformer:
    drawn = RandomFeatureConfig(features=features, seed=seed, sigma=sigma, unit_norm=unit)
    attention = AttentionConfig(n_heads=1, n_kv_heads=1, head_dim=D, scale=2.0 if unit else None)
    return block(replace(attention, random_features=drawn), causal=causal, mlp=None, norm_order="post")


def one_head(model: Transformer, x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = np.split(x[0].numpy() @ model.blocks[0].attention.qkv.weight.numpy().T, 3, axis=1)
    if model.config.attention.random_features.unit_norm:
        q, k = (part / np.sqrt((part**2).sum(1, keepdims=True)) for part in (q, k))
    return q, k, v


def attended(model: Transformer, x: Tensor) -> np.ndarray:
    """What the heads give, before W_O."""
    found: list[Tensor] = []
    hook = model.blocks[0].attention.out.register_forward_hook(lambda _m, given, _y: found.append(given[0]))
    model.apply_to(x)
    hook.remove()
    return found[0][0].numpy()


@pytest.mark.parametrize("sigma", [1.0, 0.5])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_random_feature_attention_is_what_is_printed(causal: bool, unit: bool, sigma: float) -> None:
    model, x = feature_model(unit, causal, 16, seed=3, sigma=sigma), 0.5 * elements()
    directions = model.blocks[0].attention.directions.numpy()
    scale = model.config.attention.score_scale
    wanted = naive.random_feature_attention(*one_head(model, x), directions, scale, sigma, causal=causal)
    assert np.abs(attended(model, x) - wanted).max() < 1e-9  # a denominator may be small


def test_directions_are_normal_with_the_given_sigma_and_come_from_the_seed() -> None:
    first, same, other = (
        feature_model(False, True, 4096, seed, sigma=0.7).blocks[0].attention.directions for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert abs(float(first.std()) - 0.7) < 0.02
    assert abs(float(first.mean())) < 0.02
    assert "blocks.0.attention.directions" in feature_model(False, True, 8, 1).state_dict()


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_random_features_converge_to_the_softmax_like_one_over_the_root_of_their_number(
    causal: bool, unit: bool
) -> None:
    x, medians = (0.5 if unit else 0.15) * elements(), []
    for size in SIZES:
        errors = []
        for seed in range(25):
            model = feature_model(unit, causal, size, seed=100 * seed)
            scale = model.config.attention.score_scale
            wanted = naive.softmax_attention(*one_head(model, x), scale, causal=causal)
            errors.append(np.sqrt(((attended(model, x) - wanted) ** 2).mean()))
        medians.append(np.median(errors))
    slope = np.polyfit(np.log(SIZES), np.log(medians), 1)[0]
    assert -0.6 < slope < -0.4, medians
    assert medians[-1] < 0.05 * np.abs(wanted).max()


# --- recurrent layers ------------------------------------------------------------------------------------


def recurrent(config: LstmConfig, n_layers: int = 1, width: int = WIDTH) -> Transformer:
    return random_model(
        ModelConfig(
            inputs=VectorInputs(features=width, projected=False),
            width=width,
            n_layers=n_layers,
            context=4096,
            mixer=config,
            last_norm=False,
            head=HeadConfig(kind="hidden"),
        )
    )


def lstm_weights(model: Transformer, layer: int) -> naive.LstmWeights:
    """Rows are stored in the order i, o, f, candidate."""
    lstm = model.blocks[layer].attention
    bias = torch.zeros(4 * WIDTH, dtype=torch.float64) if lstm.bias is None else lstm.bias
    parts = [
        dict(zip("iofc", np.split(part.numpy(), 4), strict=True))
        for part in (lstm.input_weight, lstm.hidden_weight, bias)
    ]
    return naive.LstmWeights(*parts)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("output", ["sigmoid", "tanh"])
@pytest.mark.parametrize("candidate", ["sigmoid", "tanh"])
def test_an_lstm_is_what_is_printed(candidate: str, output: str, bias: bool) -> None:
    model = recurrent(LstmConfig(bias=bias, candidate=candidate, output=output), n_layers=2)
    outputs, rows, states = model.apply_to(elements(20)), elements(20)[0].numpy(), []
    for layer in range(2):
        rows, h, c = naive.lstm(rows, lstm_weights(model, layer), candidate, output)
        states += [h, c]
    assert np.abs(outputs.main[0].numpy() - rows).max() < FAR
    for got, want in zip(outputs.state, states, strict=True):
        assert np.abs(got[0].numpy() - want).max() < FAR


def gates_of(layer: AblatedLstm, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    c, i, f = np.split(x @ layer.gates.weight.numpy().T + bias_of(layer.gates), 3, axis=1)
    return naive.ACTIVATIONS[layer.config.candidate](c), naive.sigmoid(i), naive.sigmoid(f)


@pytest.mark.parametrize("length", [1, 2, 31, 64, 65])
@pytest.mark.parametrize("candidate", ["sigmoid", "tanh"])
def test_an_ablated_lstm_is_its_recurrence_and_its_weighted_sum(candidate: str, length: int) -> None:
    model = recurrent(LstmConfig(ablated=True, bias=True, candidate=candidate, output="sigmoid"))
    x = elements(length)
    content, i, f = gates_of(model.blocks[0].attention, x[0].numpy())
    step_by_step = naive.ablated_cells(i, f, content)
    weighted = np.einsum("tsn,sn->tn", naive.ablated_weights(i, f), content)
    assert np.abs(step_by_step - weighted).max() < FAR
    check(model, x, naive.sigmoid(step_by_step))
    outputs = model.apply_to(x)
    assert np.abs(outputs.state[0][0].numpy() - weighted[-1]).max() < FAR


GATES = {"usual": (0.0, 1.0), "nearly shut": (-40.0, 5.0), "shut": (-1000.0, 1.0), "nearly open": (12.0, 1.0)}


@pytest.mark.parametrize("length", [300, 2000])
@pytest.mark.parametrize("gates", list(GATES))
def test_a_long_recurrence_is_its_steps_whatever_the_gates(gates: str, length: int) -> None:
    center, spread = GATES[gates]
    draw = np.random.default_rng(0)
    f_gate = center + spread * draw.standard_normal((length, 3))
    i, content = naive.sigmoid(draw.standard_normal((length, 3))), draw.standard_normal((length, 3))
    f = naive.sigmoid(f_gate)
    start = draw.standard_normal(3)
    cells, last = recurrence(
        *(torch.from_numpy(part)[None] for part in (f, i * content)), torch.from_numpy(start)[None]
    )
    wanted = naive.ablated_cells(
        np.vstack((np.ones(3), i)), np.vstack((np.ones(3), f)), np.vstack((start, content))
    )
    assert np.abs(cells[0].numpy() - wanted[1:]).max() < FAR
    assert torch.equal(last, cells[:, -1])


def shown(f_gate: np.ndarray, i_gate: np.ndarray) -> np.ndarray:
    """(T, T, N), of gates before their sigmoid."""
    gates = (torch.from_numpy(gate)[None] for gate in (f_gate, i_gate))
    return (
        recurrence_weights(*gates, torch.ones(1, len(f_gate), dtype=torch.int64))[0].permute(1, 2, 0).numpy()
    )


@pytest.mark.parametrize("gates", list(GATES))
def test_the_shown_weights_are_the_products_of_gates(gates: str) -> None:
    center, spread = GATES[gates]
    length, draw = 200, np.random.default_rng(0)
    f_gate = center + spread * draw.standard_normal((length, 3))
    i_gate = draw.standard_normal((length, 3))
    got = shown(f_gate, i_gate)
    wanted = naive.ablated_weights(naive.sigmoid(i_gate), naive.sigmoid(f_gate))
    assert np.abs(got - wanted).max() < FAR


@pytest.mark.parametrize("gates", list(GATES))
def test_the_shown_weights_are_as_good_in_float32_at_length(gates: str) -> None:
    """A bundle computes them in float32: no sum over the whole sequence may swallow what a single gate says."""
    center, spread = GATES[gates]
    length, draw = 1000, np.random.default_rng(0)
    f_gate = (center + spread * draw.standard_normal((length, 1))).astype(np.float32)
    i_gate = draw.standard_normal((length, 1)).astype(np.float32)
    got = shown(f_gate, i_gate)
    wanted = naive.ablated_weights(naive.sigmoid(i_gate), naive.sigmoid(f_gate))
    assert np.abs(got - wanted).max() < 1e-5


def test_the_shown_weights_reproduce_the_cells_also_with_pads() -> None:
    config = FAMILY["ablated-lstm"]
    model = random_model(config)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]])
    ids = random_inputs(config, 1, 8)
    outputs = model.apply_to(ids, mask)
    layer = model.blocks[0].attention
    x = model.embedding(ids, None)[0].numpy()
    content, _, _ = gates_of(layer, x)
    weights = outputs.maps["attentions.0"][0].numpy()  # (N, T, T)
    cells = np.einsum("nts,sn->tn", weights, content)
    assert np.abs(outputs.state[0][0].numpy() - cells[-1]).max() < FAR
    assert (weights[:, :, mask[0].numpy() == 0] == 0).all()
    assert (np.triu(weights, 1) == 0).all()


@pytest.mark.parametrize("kind", ["sigmoid", "tanh"])
def test_an_lstm_that_sees_no_state_and_holds_its_output_open_is_the_ablated_one(kind: str) -> None:
    full = recurrent(LstmConfig(bias=True, candidate=kind, output=kind))
    ablated = recurrent(LstmConfig(bias=True, candidate=kind, output=kind, ablated=True))
    lstm, gates = full.blocks[0].attention, ablated.blocks[0].attention.gates
    lstm.hidden_weight.zero_()
    i, o, f, c = range(4)
    lstm.bias.view(4, WIDTH)[o] = 1e4
    for row, gate in enumerate((c, i, f)):
        gates.weight.view(3, WIDTH, WIDTH)[row] = lstm.input_weight.view(4, WIDTH, WIDTH)[gate]
        gates.bias.view(3, WIDTH)[row] = lstm.bias.view(4, WIDTH)[gate]
    x = elements(40)
    check(ablated, x, full.apply_to(x).main[0].numpy())
    assert (ablated.apply_to(x).state[0] - full.apply_to(x).state[1]).abs().max() < FAR


# --- heads -----------------------------------------------------------------------------------------------


def test_heads_are_what_they_say_over_the_real_elements() -> None:
    body = block(inputs=TokenInputs(vocab_size=13))
    ids, mask = random_inputs(body.config, 1, 6), torch.tensor([[0, 1, 1, 0, 1, 0]])
    real = body.apply_to(ids, mask).main[0, mask[0] == 1].numpy()
    rows = {
        "none": body.apply_to(ids, mask).main[0].numpy(),
        "mean": real.mean(0),
        "max": real.max(0),
        "last": real[-1],
    }
    heads = [
        HeadConfig(kind="classes", size=5, pooling=pooling, bias=True)
        for pooling in ("none", "mean", "max", "last")
    ]
    heads += [HeadConfig(kind="tokens", tied=True, softcap=2.0), HeadConfig(kind="values", size=2)]
    heads += [
        HeadConfig(kind="embedding", pooling="mean", normalized=normalized) for normalized in (False, True)
    ]
    for head in heads:
        model = random_model(replace(body.config, head=head))
        model.load_state_dict(body.state_dict(), strict=False)
        wanted = rows[head.pooling]
        if model.head.weight is not None:
            wanted = wanted @ model.head.weight.numpy().T
            wanted = wanted if model.head.bias is None else wanted + model.head.bias.numpy()
        if head.softcap is not None:
            wanted = 2.0 * np.tanh(wanted / 2.0)
        if head.normalized:
            wanted = wanted / math.sqrt(sum(v * v for v in wanted))
        got = model.apply_to(ids, mask).main[0].numpy()
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() < FAR, head

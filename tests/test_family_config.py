"""Configs that cannot be are refused where they are written; those that can are stored and read back, whole."""

from __future__ import annotations

import ast
import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_bundles import FAMILY, family_model
from safetensors.torch import load_file, save_file

from tfmx import TfmxError
from tfmx.tfm_model import attention_config, config
from tfmx.tfm_model.checkpoint import CheckpointError, GenerationDefaults
from tfmx.tfm_model.config import (
    AttentionConfig,
    ConfigError,
    HeadConfig,
    LstmConfig,
    MlpConfig,
    NormConfig,
    PatchInputs,
    PositionConfig,
    RandomFeatureConfig,
    RelativeConfig,
    RotaryConfig,
    RotaryScaling,
    TokenInputs,
    VectorInputs,
)
from tfmx.tfm_model.presets import PRESETS
from tfmx.tfm_model.source import open_checkpoint
from tfmx.tfm_model.tfmx_folder import save_model, stored_weights

DECODER, ENCODER, LSTM = FAMILY["pre-norm"], FAMILY["encoder"], FAMILY["lstm"]
IMAGE, SET, PAIR = FAMILY["class-token"], FAMILY["set"], FAMILY["encoder-decoder"]
HEADS = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8)
FULL = replace(HEADS, n_kv_heads=4)
FEATURES = RandomFeatureConfig(features=8)
SHAW = RelativeConfig(kind="shaw")
YARN = RotaryScaling(kind="yarn", factor=2.0, original_context=64)
PATCHES = PatchInputs(channels=1, height=12, width=8, patch=4)


def heads(**settings: object) -> Callable[[], object]:
    return lambda: replace(FULL, **settings)


def decoder(**settings: object) -> Callable[[], object]:
    return lambda: replace(DECODER, **settings)


def given(base: object, **settings: object) -> Callable[[], object]:
    return lambda: replace(base, **settings)


# What is built, and words of the line that it gives: the field, and what was wanted.
IMPOSSIBLE: list[tuple[Callable[[], object], str, str]] = [
    # inputs
    (lambda: TokenInputs(vocab_size=0), "vocab_size is 0", "wanted a whole number from 1"),
    (lambda: TokenInputs(vocab_size=True), "vocab_size is True", "wanted a whole number"),
    (lambda: TokenInputs(vocab_size=5, scale=0.0), "inputs.scale is 0.0", "wanted a finite number above 0"),
    (lambda: TokenInputs(vocab_size=5, scale=float("nan")), "inputs.scale is nan", "finite number above 0"),
    (lambda: VectorInputs(features=0), "inputs.features is 0", "wanted a whole number"),
    (lambda: VectorInputs(features=3, projected=False, bias=True), "inputs.bias is set", "not projected"),
    (given(PATCHES, channels=0), "inputs.channels is 0", "wanted a whole number"),
    (given(PATCHES, height=-4), "inputs.height is -4", "wanted a whole number"),
    (given(PATCHES, patch=0), "inputs.patch is 0", "wanted a whole number"),
    (given(PATCHES, mean=(0.5, 0.5)), "inputs.mean has 2 numbers", "wanted one for each channel"),
    (given(PATCHES, std=()), "inputs.std has 0 numbers", "wanted one for each channel"),
    (given(PATCHES, std=(0.0,)), "inputs.std is 0.0", "wanted a finite number above 0"),
    (given(PATCHES, patch=5), "an image of 12 x 8 does not divide into patches of 5 x 5", ""),
    (given(PATCHES, width=10), "an image of 12 x 10 does not divide into patches of 4 x 4", ""),
    # positions
    (lambda: PositionConfig(kind="rotary"), "positions.kind is 'rotary'", "wanted one of one_hot, joint"),
    (lambda: PositionConfig(kind="sinusoidal", base=0.0), "positions.base is 0.0", "above 0"),
    (lambda: PositionConfig(kind="joint", features=0), "positions.features is 0", "wanted a whole number"),
    (lambda: PositionConfig(kind="joint"), "positions.features is missing", "'joint' positions need it"),
    (lambda: PositionConfig(kind="separate"), "positions.features is missing", "'separate' positions"),
    (lambda: PositionConfig(kind="learned", features=4), "positions.features is set", "have none"),
    (lambda: PositionConfig(kind="one_hot", features=4), "positions.features is set", "have none"),
    (decoder(width=47, positions=PositionConfig(kind="sinusoidal")), "width is 47", "wanted an even number"),
    (decoder(context=48, positions=PositionConfig(kind="one_hot")), "width (48) has no room", "48 places"),
    # blocks
    (lambda: NormConfig(kind="batch"), "norm.kind is 'batch'", "wanted one of rms, layer"),
    (lambda: NormConfig(eps=0.0), "norm.eps is 0.0", "wanted a finite number above 0"),
    (lambda: NormConfig(kind="rms", bias=True), "norm.bias is set", "RMSNorm has no bias"),
    (lambda: MlpConfig(hidden=0), "mlp.hidden is 0", "wanted a whole number"),
    (lambda: MlpConfig(hidden=4, activation="step"), "mlp.activation is 'step'", "wanted one of silu"),
    (lambda: MlpConfig(hidden=4, hidden_layers=3), "mlp.hidden_layers is 3", "from 1 to 2"),
    (decoder(width=0), "width is 0", "wanted a whole number"),
    (decoder(n_layers=0), "n_layers is 0", "wanted a whole number"),
    (decoder(context=0), "context is 0", "wanted a whole number"),
    (decoder(context=2.0), "context is 2.0", "wanted a whole number"),
    (decoder(norm_order="both"), "norm_order is 'both'", "wanted one of pre, post"),
    (decoder(norm=None), "norm is missing", "blocks with attention need one"),
    (decoder(windows=(3,)), "windows has 1 entries", "wanted one for each of 2 layers"),
    (decoder(windows=(3, 0)), "window is 0", "wanted a whole number"),
    (given(ENCODER, windows=(3, None)), "windows are for causal attention", "softmax"),
    (decoder(windows=(3, None), mixer=replace(FULL, random_features=FEATURES)), "windows are for", "softmax"),
    # attention
    (heads(n_heads=0), "attention.n_heads is 0", "wanted a whole number"),
    (heads(n_kv_heads=0), "attention.n_kv_heads is 0", "wanted a whole number"),
    (heads(head_dim=0), "attention.head_dim is 0", "wanted a whole number"),
    (heads(similarity="cosine"), "attention.similarity is 'cosine'", "wanted one of asymmetric"),
    (heads(combination="mean"), "attention.combination is 'mean'", "wanted one of concat, sum"),
    (heads(n_kv_heads=3), "attention.n_heads (4) must be a multiple of n_kv_heads (3)", ""),
    (heads(scale=0.0), "attention.scale is 0.0", "wanted a finite number above 0"),
    (heads(softcap=-1.0), "attention.softcap is -1.0", "wanted a finite number above 0"),
    (given(HEADS, similarity="symmetric"), "attention.similarity wants n_kv_heads (2)", "n_heads (4)"),
    (given(HEADS, full_rank_values=True, combination="sum"), "full_rank_values wants n_kv_heads (2)", "(4)"),
    (given(HEADS, random_features=FEATURES), "random_features wants n_kv_heads (2)", "n_heads (4)"),
    (heads(similarity="raw"), "attention.similarity is 'raw'", "wanted n_heads 1 (found 4)"),
    (
        lambda: AttentionConfig(n_heads=1, n_kv_heads=1, head_dim=8, similarity="raw", qk_norm=NormConfig()),
        "attention.similarity is 'raw'",
        "no qk_norm",
    ),
    (heads(qk_norm=NormConfig(kind="layer", bias=True)), "attention.qk_norm", "no bias"),
    (heads(full_rank_values=True), "attention.full_rank_values has no W_O", "wanted combination 'sum'"),
    (heads(full_rank_values=True, combination="sum", out_bias=True), "full_rank_values", "no out_bias"),
    (heads(random_features=FEATURES, softcap=3.0), "attention.random_features has no scores", "no softcap"),
    (heads(random_features=FEATURES, relative=SHAW), "attention.random_features", "no relative positions"),
    (
        decoder(mixer=AttentionConfig(n_heads=1, n_kv_heads=1, head_dim=8, similarity="raw")),
        "attention.similarity is 'raw'",
        "head_dim (8) must be the width (48)",
    ),
    (lambda: RandomFeatureConfig(features=0), "random_features.features is 0", "wanted a whole number"),
    (lambda: RandomFeatureConfig(features=8, sigma=0.0), "random_features.sigma is 0.0", "above 0"),
    (lambda: RandomFeatureConfig(features=8, seed=-1), "random_features.seed is -1", "0 to 2^62"),
    # relative and rotary
    (lambda: RelativeConfig(kind="deberta"), "relative.kind is 'deberta'", "wanted one of shaw, t5, alibi"),
    (lambda: RelativeConfig(kind="shaw", max_distance=0), "relative.max_distance is 0", "whole number"),
    (lambda: RelativeConfig(kind="t5", buckets=0), "relative.buckets is 0", "wanted a whole number"),
    (lambda: RelativeConfig(kind="t5", buckets=6), "relative.buckets is 6", "wanted a multiple of 4"),
    (
        lambda: RelativeConfig(kind="t5", buckets=16, max_distance=8),
        "relative.max_distance (8)",
        "must be above half the buckets (8)",
    ),
    (lambda: RotaryConfig(dim=0), "rotary.dim is 0", "wanted a whole number"),
    (lambda: RotaryConfig(dim=3), "rotary.dim is 3", "wanted an even number"),
    (lambda: RotaryConfig(dim=4, theta=0.0), "rotary.theta is 0.0", "above 0"),
    (lambda: RotaryConfig(dim=4, theta=1.0), "rotary.theta is 1.0", "wanted a number above 1"),
    (heads(rotary=RotaryConfig(dim=10)), "rotary.dim (10) must not be above head_dim (8)", ""),
    (given(YARN, kind="ntk"), "rotary.scaling.kind is 'ntk'", "wanted one of linear"),
    (given(YARN, factor=0.0), "rotary.scaling.factor is 0.0", "above 0"),
    (given(YARN, original_context=0), "rotary.scaling.original_context is 0", "wanted a whole number"),
    (given(YARN, beta_fast=0.0), "rotary.scaling.beta_fast is 0.0", "above 0"),
    (given(YARN, kind="llama3", low_freq_factor=4.0), "rotary.scaling.low_freq_factor (4.0)", "below"),
    (given(YARN, kind="dynamic", factor=0.5), "rotary.scaling.factor is 0.5", "at least 1"),
    (
        lambda: RotaryConfig(dim=2, scaling=replace(YARN, kind="dynamic")),
        "rotary.dim is 2",
        "wanted at least 4",
    ),
    # recurrent layers
    (lambda: LstmConfig(candidate="relu"), "lstm.candidate is 'relu'", "wanted one of tanh, sigmoid"),
    (lambda: LstmConfig(output="relu"), "lstm.output is 'relu'", "wanted one of tanh, sigmoid"),
    (given(LSTM, norm=NormConfig()), "norm is set", "LSTM layers have none"),
    (given(LSTM, mlp=MlpConfig(hidden=4)), "mlp is set", "LSTM layers have none"),
    (given(LSTM, encoder=ENCODER), "encoder is set", "LSTM layers have none"),
    (given(LSTM, causal=False), "an LSTM is causal", "wanted last_norm=False, causal=True"),
    (given(LSTM, last_norm=True), "an LSTM is causal", "wanted last_norm=False"),
    # heads
    (lambda: HeadConfig(kind="words"), "head.kind is 'words'", "wanted one of tokens"),
    (lambda: HeadConfig(pooling="sum"), "head.pooling is 'sum'", "wanted one of none, last"),
    (lambda: HeadConfig(kind="classes"), "head.size is missing", "how many classes"),
    (lambda: HeadConfig(kind="values"), "head.size is missing", "how many values"),
    (lambda: HeadConfig(kind="classes", size=0), "head.size is 0", "wanted a whole number"),
    (lambda: HeadConfig(kind="tokens", size=7), "head.size is set", "has no size of its own"),
    (lambda: HeadConfig(softcap=0.0), "head.softcap is 0.0", "above 0"),
    (lambda: HeadConfig(kind="classes", size=3, labels=("a", "b")), "head.labels has 2 names", "each class"),
    (lambda: HeadConfig(kind="values", size=1, labels=("a",)), "head.labels has 1 names", "each class"),
    (lambda: HeadConfig(kind="hidden", bias=True), "head.bias is set", "kind 'hidden' has none"),
    (lambda: HeadConfig(kind="classes", size=2, tied=True), "head.tied is set", "'classes' has none"),
    (lambda: HeadConfig(kind="embedding", softcap=2.0), "head.softcap is set", "'embedding' has none"),
    (lambda: HeadConfig(normalized=True), "head.normalized is set", "kind 'tokens' has none"),
    (given(SET, head=HeadConfig()), "head.kind is 'tokens'", "the inputs are none"),
    (
        given(FAMILY["one-hot"], head=HeadConfig(tied=True)),
        "head.tied needs embeddings as wide as the model",
        "one-hot",
    ),
    (given(SET, head=HeadConfig(kind="hidden", pooling="class_token")), "head.pooling is 'class_token'", ""),
    (given(ENCODER, head=HeadConfig(kind="embedding")), "head.kind is 'embedding'", "wanted a pooling"),
    (decoder(head=HeadConfig(pooling="mean")), "head.pooling is 'mean'", "tokens"),
    (given(ENCODER, head=HeadConfig(pooling="last")), "head.pooling is 'last'", "tokens"),
    # what the parts say about each other
    (
        given(SET, inputs=VectorInputs(features=6, projected=False)),
        "inputs.features (6) must be 48",
        "not projected",
    ),
    (given(IMAGE, causal=True), "images are read all at once", "wanted causal=False"),
    (given(IMAGE, context=9), "context is 9", "becomes 7 elements"),
    (given(IMAGE, mixer=replace(FULL, relative=SHAW)), "attention.relative is set", "image"),
    (given(IMAGE, mixer=replace(FULL, rotary=RotaryConfig(dim=4))), "attention.rotary is set", "image"),
    (decoder(attention_outputs=(2,)), "attention_outputs names layer 2", "wanted 0 to 1"),
    (decoder(attention_outputs=(True,)), "attention_outputs names layer True", "wanted 0 to 1"),
    (given(LSTM, attention_outputs=(0,)), "attention_outputs is set", "no weights over its inputs"),
    (
        decoder(mixer=replace(FULL, random_features=FEATURES), attention_outputs=(0,)),
        "attention_outputs is set",
        "random features never make the weights",
    ),
    (given(PAIR, encoder=DECODER), "encoder must be an encoder", "causal=False"),
    (given(PAIR, encoder=replace(ENCODER, head=SET.head)), "encoder must be an encoder", "kind='hidden'"),
    (given(PAIR, causal=False), "an encoder-decoder gives tokens", "wanted causal=True"),
    (given(PAIR, head=HeadConfig(kind="hidden")), "an encoder-decoder gives tokens", "kind 'tokens'"),
    (given(PAIR, mixer=replace(FULL, similarity="symmetric")), "an encoder-decoder's attention", "its own"),
]


@pytest.mark.parametrize(("build", "field", "wanted"), IMPOSSIBLE, ids=[row[1] for row in IMPOSSIBLE])
def test_a_config_that_cannot_be_is_one_line_that_names_the_field(
    build: Callable[[], object], field: str, wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    line = str(caught.value)
    assert field in line
    assert wanted in line
    assert "\n" not in line


def checks(module: object) -> dict[int, str]:
    """The lines where a config refuses: `raise ConfigError` and calls of `check_...`."""
    path = Path(module.__file__)
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            name = call.func.id
            if name.startswith("check_") or (isinstance(node, ast.Raise) and name == "ConfigError"):
                found[node.lineno] = f"{path.name}: {ast.unparse(node)}"
    return found


def test_every_check_of_the_configs_has_a_config_that_it_refuses() -> None:
    wanted = {
        (Path(module.__file__).name, line): text
        for module in (config, attention_config)
        for line, text in checks(module).items()
    }
    assert len(wanted) > 50
    for build, _, _ in IMPOSSIBLE:
        with pytest.raises(ConfigError) as caught:
            build()
        for frame in traceback.extract_tb(caught.value.__traceback__):
            wanted.pop((Path(frame.filename).name, frame.lineno), None)
    assert not list(wanted.values())


# --- folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "vaswani-base"])
def test_a_saved_model_is_read_back_with_the_same_config_and_weights(name: str, tmp_path: Path) -> None:
    config = PRESETS[name]
    model = family_model(next(other for other, found in FAMILY.items() if found == config), torch.float32)
    generation = GenerationDefaults(eos_token_ids=(3, 4), decoder_start_token_id=1, sampling={"top_p": 0.5})
    save_model(model, tmp_path / "saved", generation=generation, tokenizer_json='{"a": 1}')
    found = open_checkpoint(str(tmp_path / "saved"))
    assert found.kind == "tfmx"
    assert found.config == model.config
    assert found.generation == generation
    assert found.tokenizer_json == '{"a": 1}'
    weights = stored_weights(model)
    assert found.tensors.keys() == weights.keys()
    for key, weight in weights.items():
        assert torch.equal(found.tensors[key].read(), weight)


def test_what_a_model_shares_on_its_own_account_is_saved_under_each_name(tmp_path: Path) -> None:
    model = family_model("encoder-decoder", torch.float32)
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
    save_model(model, tmp_path / "saved")
    found = open_checkpoint(str(tmp_path / "saved")).tensors
    for layer in (0, 1):
        assert torch.equal(found[f"blocks.{layer}.mlp.up.weight"].read(), model.blocks[0].mlp.up.weight)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(family_model("random-features", torch.float32), tmp_path / "saved")
    return tmp_path / "saved"


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


WRONG_CONFIGS: dict[str, tuple[Callable[[dict], object], str]] = {
    "unknown key": (lambda c: c.update(dropout=0.1), "dropout is not a known key"),
    "unknown key inside": (lambda c: c["norm"].update(scale=1), "norm.scale is not a known key"),
    "unknown key of attention": (lambda c: c["mixer"].update(dropout=1), "mixer.dropout is not a known key"),
    "unknown key of inputs": (lambda c: c["inputs"].update(padding=0), "inputs.padding is not a known key"),
    "missing key": (lambda c: c.pop("width"), "width is missing"),
    "missing key of attention": (lambda c: c["mixer"].pop("head_dim"), "mixer.head_dim is missing"),
    "missing key of inputs": (lambda c: c["inputs"].pop("learned"), "inputs.learned is missing"),
    "text for a number": (lambda c: c.update(width="48"), "width is '48', expected a whole number"),
    "choice that there is not": (lambda c: c.update(norm_order="both"), "norm_order is 'both'"),
    "number that cannot be": (lambda c: c["mixer"].update(head_dim=0), "attention.head_dim is 0"),
    "parts that do not fit": (lambda c: c.update(norm=None), "norm is missing"),
}


@pytest.mark.parametrize("name", list(WRONG_CONFIGS))
def test_a_wrong_config_file_is_one_clear_line(saved: Path, name: str) -> None:
    change, words = WRONG_CONFIGS[name]
    edit_config(saved, change)
    with pytest.raises(TfmxError) as caught:
        open_checkpoint(str(saved))
    line = str(caught.value)
    assert words in line
    assert "config.json" in line
    assert "\n" not in line


QKV = "blocks.1.attention.qkv.weight"
WRONG_WEIGHTS: dict[str, tuple[Callable[[dict], object], str]] = {
    "missing tensor": (lambda t: t.pop(QKV), f"has no tensor {QKV}"),
    "missing directions": (lambda t: t.pop("blocks.0.attention.directions"), "has no tensor blocks.0"),
    "extra tensor": (lambda t: t.update(extra=torch.ones(2)), "has a tensor extra"),
    "wrong shape": (
        lambda t: t.update({QKV: t[QKV].T.contiguous()}),
        f"{QKV} has the shape (48, 96), wanted (96, 48)",
    ),
}


@pytest.mark.parametrize("name", list(WRONG_WEIGHTS))
def test_wrong_weights_are_one_clear_line(saved: Path, name: str) -> None:
    change, words = WRONG_WEIGHTS[name]
    edit_weights(saved, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(saved))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_missing_file_is_one_clear_line(saved: Path, file: str) -> None:
    (saved / file).unlink()
    with pytest.raises(TfmxError) as caught:
        open_checkpoint(str(saved))
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)

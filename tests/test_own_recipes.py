"""The recipes of examples/own: what they export computes what the packages' own forward computes, without a cache and without pads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import tfmx as run
from public_packages import X_TRANSFORMERS, importable
from torch import Tensor, nn

import tfmx
from tfmx.export.own_module import build_module
from tfmx.export.pipeline import ExportOptions, export

RECIPES = Path(__file__).parents[1] / "examples" / "own"
CLOSE = 2e-5  # of float32 numbers relative to the largest, summed in another order through a few layers
ROWS = [[5, 6, 7, 8, 9, 10, 11], [3], [90, 4, 17]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Callable[..., tuple[nn.Module, Path]]:
    """A recipe's factory → its module, and the bundle that it was verified into."""
    done: dict[tuple[str, str], tuple[nn.Module, Path]] = {}

    def make(recipe: str, factory: str = "build") -> tuple[nn.Module, Path]:
        key = recipe, factory
        if key not in done:
            file = RECIPES / f"{recipe}.py"
            bundle = tmp_path_factory.mktemp(recipe) / factory
            parity = export(f"{file}:{factory}", bundle, ExportOptions(target="portable"))
            assert parity is not None
            assert parity.passed
            done[key] = build_module(file, factory).eval(), bundle
        return done[key]

    return make


def check_close(found: np.ndarray, wanted: Tensor) -> None:
    gap, size = np.abs(found - wanted.numpy()), float(wanted.abs().max())
    assert found.shape == tuple(wanted.shape)
    assert gap.max() <= CLOSE * max(size, 1.0), f"off by {gap.max():.2g} of {size:.2g}"


@torch.no_grad()
def greedy(
    logits: Callable[[Tensor], Tensor], start: list[int], count: int, end: int | None = None
) -> list[int]:
    """By computing everything anew for each token."""
    ids = list(start)
    for _ in range(count):
        ids.append(int(logits(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == end:
            break
    return ids[len(start) :]


def answers(bundle: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    with tfmx.load(bundle) as model:
        return [list(result.token_ids) for result in model.generate_batch(prompts, max_new_tokens=count)]


@torch.no_grad()
def test_a_classifier_around_transformer_encoder(exported) -> None:
    module, bundle = exported("transformer_encoder")
    with tfmx.load(bundle) as model:
        found = model.apply_batch(ROWS)
    for row, ids in zip(found, ROWS, strict=True):
        x = module.tokens(torch.tensor([ids])) + module.positions(torch.arange(len(ids)))
        check_close(row["logits"], module.head(module.encoder(x)[0, 0]))
    done = run("run", str(bundle), "--ids", "5,6,7")
    assert done.code == 0
    assert "so so" in done.out


@pytest.mark.slow
def test_a_translator_around_transformer(exported) -> None:
    module, bundle = exported("translator")

    def logits(source: list[int]) -> Callable[[Tensor], Tensor]:
        x = module.tokens(torch.tensor([source])) + module.positions(torch.arange(len(source)))

        def of(target: Tensor) -> Tensor:
            y = module.tokens(target) + module.positions(torch.arange(target.shape[1]))
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return module.head(module.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))

        return of

    wanted = [greedy(logits(row), [module.decoder_start_token_id], 12, end=2) for row in ROWS]
    assert len({tuple(ids) for ids in wanted}) > 1  # the source matters
    assert answers(bundle, ROWS, 12) == wanted
    with tfmx.load(bundle) as model, torch.no_grad():
        check_close(
            model.apply(ROWS[0], target=[7, 8])["logits"], logits(ROWS[0])(torch.tensor([[1, 7, 8]]))[0]
        )


def test_a_language_model_around_lstm(exported) -> None:
    module, bundle = exported("lstm")

    def logits(ids: Tensor) -> Tensor:
        return module.head(module.lstm(module.embed(ids))[0])

    assert answers(bundle, ROWS, 12) == [greedy(logits, row, 12) for row in ROWS]
    with tfmx.load(bundle) as model, torch.no_grad():
        check_close(model.logits(ROWS[0]), logits(torch.tensor([ROWS[0]]))[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the packages' own
def test_x_transformers(exported) -> None:
    with importable("x-transformers", X_TRANSFORMERS):
        encoder, encoder_bundle = exported("x_transformers_models", "build_encoder")
        decoder, decoder_bundle = exported("x_transformers_models", "build_decoder")
        with tfmx.load(encoder_bundle) as model, torch.no_grad():
            for row, ids in zip(model.apply_batch(ROWS), ROWS, strict=True):
                check_close(
                    row["embedding"], encoder.model(torch.tensor([ids]), return_embeddings=True)[0, 0]
                )
        assert answers(decoder_bundle, ROWS, 12) == [greedy(decoder.model, row, 12) for row in ROWS]


@pytest.mark.parametrize("recipe", ["vit_timm", "vit_torchvision"])
@torch.no_grad()
def test_vision_transformers(exported, recipe: str) -> None:
    package = recipe.removeprefix("vit_")
    pytest.importorskip(
        "torchvision", reason=f"{package} needs the torchvision that fits this torch", exc_type=ImportError
    )
    pytest.importorskip(package)
    module, bundle = exported(recipe)
    images = torch.randn(3, *module.inputs().image, generator=torch.Generator().manual_seed(1))
    with tfmx.load(bundle) as model:
        found = np.stack([row["logits"] for row in model.apply_batch(list(images.numpy()))])
    check_close(found, module(images))


@pytest.mark.parametrize(("variable", "factory"), [("NANOGPT", "build"), ("MINGPT", "build_mingpt")])
def test_clones_of_public_gpts(exported, variable: str, factory: str) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no clone")
    module, bundle = exported("nanogpt", factory)
    assert answers(bundle, ROWS, 12) == [greedy(lambda ids: module.gpt(ids)[0], row, 12) for row in ROWS]
    with tfmx.load(bundle) as model, torch.no_grad():
        for row in ROWS:
            check_close(model.logits(row)[-1], module.gpt(torch.tensor([row]))[0][0, -1])


def test_the_gpt_recipe_runs_hugging_faces_gpt2(tmp_path, monkeypatch) -> None:
    """What is in the registries of the GPTs that it is for."""
    monkeypatch.syspath_prepend(RECIPES)
    file = tmp_path / "gpt2.py"
    file.write_text("""
import torch
from nanogpt import CachedGpt
from transformers import GPT2Config, GPT2LMHeadModel

def build():
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                        initializer_range=0.3)  # so that its answers vary
    return CachedGpt(GPT2LMHeadModel(config), 4)
""")
    export(f"{file}:build", tmp_path / "bundle", ExportOptions())
    gpt = build_module(file, "build").eval().gpt
    assert answers(tmp_path / "bundle", ROWS, 12) == [
        greedy(lambda ids: gpt(ids).logits, row, 12) for row in ROWS
    ]


def test_the_readmes_module_is_complete(tmp_path) -> None:
    text = (RECIPES.parents[1] / "README.md").read_text(encoding="utf-8")
    [code] = [
        block.partition("\n```")[0] for block in text.split("```python\n")[1:] if "def inputs(self)" in block
    ]
    (tmp_path / "sentiment.py").write_text(code)
    assert run("export", f"{tmp_path / 'sentiment.py'}:build", "-o", tmp_path / "sentiment").code == 0
    done = run("run", tmp_path / "sentiment", "--ids", "5,17,3")
    assert done.code == 0
    assert "so so" in done.out


def test_every_recipe_is_in_the_readme() -> None:
    text = (RECIPES.parents[1] / "README.md").read_text(encoding="utf-8")
    assert [
        file.name for file in sorted(RECIPES.glob("*.py")) if f"](examples/own/{file.name})" not in text
    ] == []

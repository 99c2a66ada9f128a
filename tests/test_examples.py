"""The training examples, in a short form: they train, they export, and what they export computes what PyTorch computes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import tfmx as run

import tfmx

EXAMPLES = Path(__file__).parents[1] / "examples"
CLOSE = 2e-3  # of float32 logits and values of size 1 to 10, summed in another order through a few layers
STEPS = {"train_char_lm": 12, "train_vit": 25, "train_seq2seq": 25, "train_forecast": 8, "train_sets": 25}
FEWER = {"train_char_lm": {"contexts": (16, 64)}, "train_seq2seq": {"count": 20}}


@pytest.fixture(scope="module", autouse=True)
def as_scripts():
    """They import `training`, which lies beside them, and run on one thread."""
    sys.path.insert(0, str(EXAMPLES))
    with importlib.import_module("training").one_thread():
        yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """name → its module, the folder it wrote to, and its outcomes; each is run once."""
    done = {}

    def run_example(name):
        if name not in done:
            module = importlib.import_module(name)
            folder = tmp_path_factory.mktemp(name)
            found = module.main(folder, STEPS[name], **FEWER.get(name, {}))
            done[name] = module, folder, found if isinstance(found, list) else [found]
        return done[name]

    return run_example


@pytest.mark.parametrize("name", STEPS)
def test_an_example_trains_and_scores_like_pytorch(trained, name) -> None:
    _, _, outcomes = trained(name)
    for outcome in outcomes:
        assert outcome.last_loss < outcome.first_loss, outcome.name
        assert outcome.exported == pytest.approx(outcome.pytorch, abs=CLOSE), outcome.name
        assert (outcome.bundle / "manifest.json").exists()


def check_close(found, wanted) -> None:
    gap = np.abs(found - wanted)
    assert gap.max() < CLOSE * max(1.0, float(np.abs(wanted).max())), (
        f"max {gap.max():.2g}, mean {gap.mean():.2g}"
    )


@torch.no_grad()
def test_character_models_give_pytorchs_logits_on_held_out_text(trained) -> None:
    module, _, outcomes = trained("train_char_lm")
    windows = module.held_out_windows(module.read_texts()[1])[:3]
    for outcome in outcomes:
        with tfmx.load(outcome.bundle) as model:
            found = module.exported_logits(model, windows).numpy()
        check_close(found, outcome.model.apply_to(windows[:, :-1]).main.numpy())


def test_no_paragraph_is_both_trained_on_and_held_out(trained) -> None:
    known, held_out = (set(text.split("\n\n")) for text in trained("train_char_lm")[0].read_texts())
    assert len(held_out) > 50
    assert not known & held_out


def test_a_tokenizer_of_characters_gives_every_text_back(trained) -> None:
    module, _, outcomes = trained("train_char_lm")
    text = module.read_texts()[1][:500] + "  \n\n <unk> \n"
    with tfmx.load(outcomes[0].bundle) as model:
        ids = model.encode(text)
        assert ids == module.CHARACTERS.ids(text)
        assert model.tokenizer.decode(ids) == text == module.CHARACTERS.text(ids)
        assert model.encode("é") == [0]


@torch.no_grad()
def test_digits_give_pytorchs_logits_and_a_file_what_its_pixels_give(trained) -> None:
    module, folder, [outcome] = trained("train_vit")
    images, _ = module.draw_digits(12, np.random.default_rng(5))
    inputs = module.as_input(images)
    module.Image.fromarray(images[0]).save(folder / "first.png")
    with tfmx.load(outcome.bundle) as model:
        found = np.stack([each["logits"] for each in model.apply_batch(list(inputs))])
        from_file = model.apply(folder / "first.png")["logits"]
        assert model.manifest.outputs.labels == module.DIGITS
    check_close(found, outcome.model.apply_to(torch.from_numpy(inputs)).main.numpy())
    check_close(from_file, found[0])


def test_dates_are_answered_as_pytorch_answers_them(trained) -> None:
    module, _, [outcome] = trained("train_seq2seq")
    pairs = module.draw_pairs(module.days()[1], 12, np.random.default_rng(5))
    sources = [source for source, _ in pairs]
    with tfmx.load(outcome.bundle) as model:
        assert [result.text for result in model.generate_batch(sources)] == module.greedy(
            outcome.model, sources
        )


def test_every_date_fits_its_characters_and_the_model(trained) -> None:
    module, _, _ = trained("train_seq2seq")
    known, held_out = module.days()
    assert not set(known) & set(held_out)
    for day in held_out[:200]:
        for spelling in module.SPELLINGS:
            text = module.spelled(day, spelling)
            assert 0 not in module.CHARACTERS.ids(text), text
            assert len(text) < module.LONGEST


@torch.no_grad()
def test_forecasts_are_pytorchs_in_the_units_of_the_series(trained) -> None:
    module, _, outcomes = trained("train_forecast")
    windows = module.held_out_windows(module.make_series(np.random.default_rng(5)))[:2]
    for outcome in outcomes:
        with tfmx.load(outcome.bundle) as model:
            found = module.apply_all(model, windows)
        check_close(found, outcome.model.apply_to(torch.from_numpy(windows[:, : module.WEEK])).main.numpy())
        assert 20 < found[..., 1].mean() < 120  # MW


@torch.no_grad()
def test_sets_give_pytorchs_logits_in_any_order(trained) -> None:
    module, _, [outcome] = trained("train_sets")
    random = np.random.default_rng(5)
    sets, _ = module.draw_sets(8, random)
    with tfmx.load(outcome.bundle) as model:
        found = np.stack([each["logits"] for each in model.apply_batch(sets)])
        shuffled = [random.permutation(points, axis=0) for points in sets]
        again = np.stack([each["logits"] for each in model.apply_batch(shuffled)])
    check_close(found, outcome.model.apply_to(*module.together(sets)).main.numpy())
    check_close(again, found)


@pytest.mark.parametrize(
    ("name", "bundle", "given"),
    [
        ("train_char_lm", "random-features", "The statement "),
        ("train_vit", "digits", "digit.png"),
        ("train_seq2seq", "dates", "March 3, 2021"),
        ("train_forecast", "ablated", "week.csv"),
        ("train_sets", "points", "ring.csv"),
    ],
)
def test_the_command_line_runs_what_an_example_exports(trained, name, bundle, given) -> None:
    _, folder, _ = trained(name)
    given = str(folder / given) if "." in given else given
    limit = ["--max-tokens", "5"] if name in {"train_char_lm", "train_seq2seq"} else []
    done = run("run", str(folder / bundle), given, *limit)
    assert done.code == 0, done
    assert done.out.removesuffix("\n")  # blanks are text too


def test_a_false_claim_is_one_line_and_an_exit_code(tmp_path) -> None:
    code = "import training; training.claim(False, 'the moon is cheese')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "the claim does not hold: the moon is cheese\n"


def test_steps_must_be_some() -> None:
    command = [sys.executable, str(EXAMPLES / "train_sets.py"), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "wanted 1 or more" in done.stderr

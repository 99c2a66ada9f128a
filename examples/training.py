"""What the training examples share: a training loop, characters as tokens, and the way from a model to its bundle.

It is meant to be read, and to be copied: `fit` is a training loop of PyTorch like any other, `make_bundle` is
what there is to do after it.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tfmx.cli.progress import Bars
from tfmx.export.options import ExportOptions
from tfmx.export.pipeline import export
from tfmx.tfm_model.checkpoint import GenerationDefaults
from tfmx.tfm_model.tfmx_folder import save_model
from tfmx.tfm_model.transformer import Transformer

SEED = 2017
WARM_UP = 0.05  # the share of the steps in which the learning rate grows
CLIP = 1.0  # the norm that gradients are cut to
UNKNOWN = "<unk>"
IGNORED = -100  # a target that cross_entropy does not count

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A model that was trained and exported, with its score on held-out data on both sides."""

    name: str
    model: Transformer
    bundle: Path
    first_loss: float
    last_loss: float
    pytorch: float
    exported: float

    @property
    def loss_line(self) -> str:
        return f"loss  {self.name:<8}  first {self.first_loss:.4f}   last {self.last_loss:.4f}"


class Main(Protocol):
    def __call__(self, folder: Path, steps: int) -> object: ...


def seeded() -> np.random.Generator:
    """PyTorch's seed is set; what is drawn with numpy comes from the generator."""
    torch.manual_seed(SEED)
    return np.random.default_rng(SEED)


def fit(
    model: Transformer, loss_of_batch: Callable[[], Tensor], steps: int, *, rate: float, title: str
) -> tuple[float, float]:
    """Train with Adam; the loss of the first step, and the mean of the last tenth."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_factor(step, steps))
    losses: list[float] = []
    model.train()
    with _bar() as bar:
        task = bar.add_task(title, total=steps, loss=math.nan)
        for _ in range(steps):
            loss = loss_of_batch()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.update(task, advance=1, loss=losses[-1])
    model.eval()
    return losses[0], float(np.mean(losses[-max(steps // 10, 1) :]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and with one, sums are the same on any machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rate_factor(step: int, steps: int) -> float:
    """Up in a line, down in half a cosine."""
    done = (step + 1) / steps
    return (
        done / WARM_UP if done < WARM_UP else 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
    )


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,  # the lines on stdout say the rest
        redirect_stdout=False,
    )


def make_bundle(
    model: Transformer,
    folder: Path,
    name: str,
    *,
    tokenizer_json: str | None = None,
    generation: GenerationDefaults | None = None,
    attentions: tuple[int, ...] | Literal["all"] = (),
) -> Path:
    """folder/NAME-checkpoint is the trained model, folder/NAME the bundle made of it; older ones are replaced."""
    checkpoint, bundle = folder / f"{name}-checkpoint", folder / name
    for old in (checkpoint, bundle):
        shutil.rmtree(old, ignore_errors=True)
    save_model(model, checkpoint, tokenizer_json=tokenizer_json, generation=generation)
    with Bars() as bars:
        export(
            str(checkpoint), bundle, ExportOptions(attentions=attentions), bars
        )  # raises if the gate fails
    return bundle


class Characters:
    """A token for each character, after the special tokens; `json` is the same as a tokenizer.json."""

    def __init__(self, alphabet: str, specials: Sequence[str] = ()) -> None:
        self.specials = (UNKNOWN, *specials)
        names = (*self.specials, *sorted(set(alphabet)))
        self._names = names
        self._ids = {name: token_id for token_id, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, text: str) -> list[int]:
        return [self._ids.get(character, 0) for character in text]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self._names[token_id] for token_id in ids if token_id >= len(self.specials))

    def special(self, name: str) -> int:
        return self._ids[name]

    @property
    def json(self) -> str:
        tokenizer = Tokenizer(models.WordLevel(self._ids, unk_token=UNKNOWN))
        tokenizer.add_special_tokens(list(self.specials))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()  # side by side, with nothing between
        return str(tokenizer.to_str())


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """(B, T), filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def accuracy(logits: npt.ArrayLike, classes: npt.ArrayLike) -> float:
    return float((np.asarray(logits).argmax(-1) == np.asarray(classes)).mean())


def claim(is_true: bool, message: str) -> None:
    if not is_true:
        sys.exit(f"the claim does not hold: {message}")


def command_line(main: Main, description: str, name: str, steps: int) -> None:
    """`--out` and `--steps`, given to `main`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".demo") / name, help="where bundles go [%(default)s]"
    )
    parser.add_argument(
        "--steps", type=_count, default=steps, help="fewer are quicker, and claim nothing [%(default)s]"
    )
    chosen = parser.parse_args()
    with one_thread():
        main(chosen.out, chosen.steps)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} steps; wanted 1 or more")
    return number

"""An LSTM and an ablated LSTM (Levy et al. 2018) that forecast the weather and the power that a town will draw.

    python examples/train_forecast.py
    tfmx run .demo/forecast/lstm .demo/forecast/week.csv        # after each hour: °C and MW six hours later
    tfmx run .demo/forecast/ablated .demo/forecast/week.csv
    tfmx attend .demo/forecast/ablated .demo/forecast/week.csv -o week.html

The series is made up, not easy: days and weekends, weather that wanders, heating when it is cold, a trend, and noise.
The models are trained on its first part and tested on the rest, against two naive forecasts: that all stays as
it is, and that it will be as it was at that hour yesterday. The bundles take and give °C and MW as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from training import FloatArray, Outcome, claim, command_line, fit, make_bundle, seeded

import tfmx
from tfmx.runtime.model import Model
from tfmx.tfm_model.config import HeadConfig, LstmConfig, ModelConfig, VectorInputs
from tfmx.tfm_model.transformer import Transformer

STEPS, BATCH, LENGTH = 700, 16, 72
DAY, WEEK = 24, 168  # hours
HOURS = 80 * WEEK
TRAINED = 60 * WEEK  # the rest is held out
AHEAD = 6  # hours
COLUMNS = ("temperature", "power")  # °C, MW
WANTED = 0.6  # of the error that the naive forecast makes

LSTM = ModelConfig(
    inputs=VectorInputs(features=2, bias=True),
    width=64,
    n_layers=1,
    context=4096,
    mixer=LstmConfig(bias=True),
    last_norm=False,
    head=HeadConfig(kind="values", size=2, bias=True),
)
# Its gates see no state, which depth makes up for in part; all of a sequence at once, its steps are quick.
ABLATED = replace(LSTM, width=48, n_layers=3, mixer=LstmConfig(ablated=True, bias=True))
MODELS = {"lstm": (LSTM, 1), "ablated": (ABLATED, 2)}  # and how many times the steps


def wander(count: int, memory: float, size: float, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Noise that remembers: x_t = memory x_{t-1} + e_t, of standard deviation `size`."""
    steps = random.normal(0, size * (1 - memory**2) ** 0.5, count)
    x = np.zeros(count)
    for t in range(1, count):
        x[t] = memory * x[t - 1] + steps[t]
    return x


def make_series(random: np.random.Generator) -> FloatArray:
    """(hours, 2)."""
    t = np.arange(HOURS)
    sun = np.sin(2 * np.pi * (t - 9) / DAY)  # highest at three in the afternoon
    cloud = 1 + 0.3 * wander(HOURS, 0.98, 1, random)
    temperature = 12 + 4 * sun * cloud + wander(HOURS, 0.995, 4, random) + random.normal(0, 0.3, HOURS)
    work = np.where(t % WEEK // DAY < 5, 1.0, 0.5)
    shape = np.clip(np.sin(2 * np.pi * (t - 6) / DAY), 0, None) + 0.6 * np.exp(-(((t % DAY) - 19) ** 2) / 4)
    heating = np.convolve(np.clip(16 - temperature, 0, None), np.full(6, 1 / 6))[:HOURS]  # houses cool slowly
    power = 40 + t / 1500 + 20 * work * shape + 1.2 * heating + random.normal(0, 0.8, HOURS)
    return np.stack([temperature, power], 1).astype(np.float32)


def take_units(model: Transformer, mean: Tensor, std: Tensor) -> None:
    """A model of (x - mean) / std becomes one of x: its first and last linear map take the units in."""
    project, head = model.embed.project, model.head
    assert project is not None
    assert head.weight is not None
    assert head.bias is not None
    with torch.no_grad():
        project.weight /= std
        project.bias.copy_(project.bias - project.weight @ mean)
        head.weight *= std[:, None]
        head.bias.copy_(head.bias * std + mean)


def train(
    config: ModelConfig, name: str, series: FloatArray, steps: int, random: np.random.Generator
) -> tuple[Transformer, tuple[float, float]]:
    model = Transformer(config)
    known = torch.from_numpy(series[:TRAINED])
    mean, std = known.mean(0), known.std(0)
    scaled = (known - mean) / std

    def loss_of_batch() -> Tensor:
        starts = random.integers(TRAINED - LENGTH - AHEAD, size=BATCH)
        rows = torch.stack([scaled[start : start + LENGTH + AHEAD] for start in starts])
        return F.mse_loss(model.apply_to(rows[:, :LENGTH]).main, rows[:, AHEAD:])

    losses = fit(model, loss_of_batch, steps, rate=1e-2, title=f"training the {name} model")
    take_units(model, mean, std)
    return model, losses


def held_out_windows(series: FloatArray) -> FloatArray:
    """(B, WEEK + AHEAD, 2): a week and what follows it, again and again."""
    starts = range(TRAINED, HOURS - WEEK - AHEAD, WEEK)
    return np.stack([series[start : start + WEEK + AHEAD] for start in starts])


def error(forecasts: npt.NDArray[np.float32], windows: FloatArray) -> npt.NDArray[np.float64]:
    """The mean absolute error of each column; a window's first day is there to be read only."""
    gap = forecasts[:, DAY:] - windows[:, DAY + AHEAD :]
    errors: npt.NDArray[np.float64] = np.abs(gap).mean((0, 1), dtype=np.float64)
    return errors


def shown(name: str, errors: npt.NDArray[np.float64]) -> str:
    return f"{name:<24}{errors[0]:6.3f} °C{errors[1]:8.3f} MW"


def apply_all(model: Model, windows: FloatArray) -> FloatArray:
    return np.stack([found["values"] for found in model.apply_batch(list(windows[:, :WEEK]))])


def main(folder: Path, steps: int = STEPS) -> list[Outcome]:
    random = seeded()
    series = make_series(random)
    windows = held_out_windows(series)
    naive = error(windows[:, :WEEK], windows)
    yesterday = error(np.roll(windows, DAY - AHEAD, axis=1)[:, :WEEK], windows)
    outcomes, lines = [], [shown("as now", naive), shown("as yesterday", yesterday)]
    for name, (config, times) in MODELS.items():
        model, (first, last) = train(config, name, series, times * steps, random)
        bundle = make_bundle(model, folder, name, attentions=(0,) if config is ABLATED else ())
        with torch.no_grad():
            ours = error(model.apply_to(torch.from_numpy(windows[:, :WEEK])).main.numpy(), windows)
        with tfmx.load(bundle) as loaded:
            theirs = error(apply_all(loaded, windows), windows)
        lines += [shown(f"{name}, PyTorch", ours), shown(f"{name}, exported", theirs)]
        outcomes.append(
            Outcome(
                name=name,
                model=model,
                bundle=bundle,
                first_loss=first,
                last_loss=last,
                pytorch=float((ours / naive).mean()),
                exported=float((theirs / naive).mean()),
            )
        )
        print(outcomes[-1].loss_line)
    header = ",".join(COLUMNS)
    np.savetxt(folder / "week.csv", windows[0, :WEEK], "%.3f", delimiter=",", header=header, comments="")
    print(f"mean error of forecasts {AHEAD} hours ahead, over {len(windows)} held-out weeks")
    print("\n".join(lines))
    if steps >= STEPS:
        for outcome in outcomes:
            found = f"found {outcome.exported:.3f} of the naive error"
            claim(
                outcome.exported < WANTED, f"{outcome.name} is below {WANTED:.0%} of the naive error, {found}"
            )
            claim(
                outcome.exported < outcome.pytorch * 1.001, f"{outcome.name} is as good as PyTorch, {found}"
            )
    return outcomes


if __name__ == "__main__":
    command_line(main, __doc__ or "", "forecast", STEPS)

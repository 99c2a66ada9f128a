"""Logits that stay on the device: the bundle's select and sample graphs choose there, only tokens come back.

Only what was asked for besides the token (logprobs) brings the logits to the host. The draw is the sampler's
(sampling.py), in float32 and always in the order of likelihood: a seed gives the same tokens on one kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .bundle import Bundle
from .devices import Device
from .sampling import Draw, SamplingOptions
from .session import Session

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
_BELOW_ONE = np.float32(1 - 2**-24)  # the largest float32 under 1: a draw of 1 would be past the end


@dataclass(frozen=True, slots=True)
class Drawn:
    tokens: IntArray  # (B,)
    logits: FloatArray  # (B,): of the tokens, after penalties and bias
    finite: npt.NDArray[np.bool_]  # (B,): whether all the model's logits are


@dataclass(frozen=True, slots=True)
class Chooser:
    select: Session  # logits (B, V) → token (B,), check (B,) = sum(0 * logits): 0 unless one is not finite
    sample: Session  # the same, with the options and the numbers of `Draw`


def open_chooser(bundle: Bundle, device: Device) -> Chooser:
    return Chooser(Session(bundle, "select", device), Session(bundle, "sample", device))


@dataclass(frozen=True, slots=True)
class DeviceLogits:
    pointer: int  # (B, V) on the device
    shape: tuple[int, int]
    read: Callable[[], FloatArray]  # copies them to the host; keeps their memory alive
    chooser: Chooser

    def numpy(self) -> FloatArray:
        return self.read()

    def greedy(self) -> tuple[list[int], list[bool]]:
        token, check = np.empty(self.shape[0], np.int64), np.empty(self.shape[0], np.float32)
        self._run(self.chooser.select, {}, {"token": token, "check": check})
        return token.tolist(), (check == 0).tolist()

    @property
    def can_draw(self) -> bool:
        return True

    def draw(self, draws: Sequence[Draw], options: SamplingOptions) -> Drawn:
        B, V = self.shape
        is_greedy = options.temperature == 0
        ids, penalty, minus = _padded(draws)
        inputs = {
            "ids": ids,
            "penalty": penalty,
            "minus": minus,
            "inverse_temperature": np.asarray(1 if is_greedy else 1 / options.temperature, np.float32),
            "top_k": np.asarray([1 if is_greedy else min(options.top_k or V, V)], np.int64),
            "top_p": np.asarray(options.top_p, np.float32),
            "min_p": np.asarray(options.min_p, np.float32),
            "uniform": np.minimum(np.asarray([[draw.uniform] for draw in draws], np.float32), _BELOW_ONE),
        }
        token, logit, check = np.empty(B, np.int64), np.empty(B, np.float32), np.empty(B, np.float32)
        self._run(self.chooser.sample, inputs, {"token": token, "logit": logit, "check": check})
        return Drawn(token, logit, check == 0)

    def _run(self, session: Session, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        binding = session.binding()
        binding.device_input("logits", np.float32, self.shape, self.pointer)
        for name, array in inputs.items():
            binding.input(name, array)
        for name, array in outputs.items():
            binding.output(name, array)
        session.run(binding)


def _padded(draws: Sequence[Draw]) -> tuple[IntArray, FloatArray, FloatArray]:
    """Rows of one length, (B, K): a row's first change again, or one that changes nothing."""
    K = max(1, *(len(draw.ids) for draw in draws))
    ids = np.zeros((len(draws), K), np.int64)
    penalty, minus = np.ones((len(draws), K), np.float32), np.zeros((len(draws), K), np.float32)
    for row, draw in enumerate(draws):
        count = len(draw.ids)
        for array, values in ((ids, draw.ids), (penalty, draw.penalty), (minus, draw.minus)):
            if count:
                array[row, :count], array[row, count:] = values, values[0]
    return ids, penalty, minus

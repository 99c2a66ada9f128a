"""How far off a case is: all rows count where nothing is rounded, most rows where activations are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tfmx.export.parity import ROUNDED_ROWS, _error

ROWS = np.full((9, 4), 0.5)


def with_rows(count: int, value: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[:count, 2] = value
    return rows


def test_without_rounding_the_worst_row_decides() -> None:
    assert _error(with_rows(1, -48.0), 1.0) == 48


def test_with_rounding_a_few_rows_that_went_astray_do_not_decide_and_more_do() -> None:
    assert _error(with_rows(1, -48.0), ROUNDED_ROWS) == 0.5
    assert _error(with_rows(2, 48.0), ROUNDED_ROWS) == 0.5
    assert _error(with_rows(3, -48.0), ROUNDED_ROWS) == 48


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_of_a_few_rows_all_count(count: int) -> None:
    assert _error(with_rows(1, 48.0)[:count], ROUNDED_ROWS) == 48


@pytest.mark.parametrize("share", [1.0, ROUNDED_ROWS])
def test_one_number_that_is_none_fails_every_comparison(share: float) -> None:
    found = _error(with_rows(1, math.nan), share)
    assert math.isnan(found)
    assert not found <= math.inf
    assert _error(with_rows(1, math.inf), share) == math.inf
    assert _error(np.zeros((0, 4)), share) == 0

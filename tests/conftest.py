"""What every test file may use. Helper modules beside the tests (e.g. `tiny_bundle`) import by their bare name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing to the path
torch.set_num_threads(1)  # models are tiny here: threads that wait for each other cost more than they bring


@pytest.fixture(autouse=True, scope="session")
def _one_registry_of_translations() -> Iterator[None]:
    """torch.onnx collects its translations of all operators anew for every trace: a third of an export's time."""
    collect = functools.cache(ONNXRegistry.from_torchlib)
    with mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(collect)):
        yield

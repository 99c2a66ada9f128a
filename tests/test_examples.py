"""The training examples, in a short form: they train, they export, and what they export computes what PyTorch computes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run

import tfmx

EXAMPLES = Path(__file__).parents[1] / "examples"
CLOSE = 2e-3  # of float32 logits and values of size 1 to 10, summed in another order through a few layers
STEPS = {"train_char_lm": 12, "train_vit": 25, "train_seq2seq": 25, "train_forecast": 8, "train_sets": 25}


@pytest.fixture(scope="module", autouse=True)
def examples_on_path():
    """They import `training`, which lies beside them, as a script does."""
    sys.path.insert(0, str(EXAMPLES))
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
            found = module.main(folder, STEPS[name])
            done[name] = module, folder, found if isinstance(found, list) else [found]
        return done[name]

    return run_example

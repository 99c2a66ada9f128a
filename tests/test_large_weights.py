"""Weights of more than 2 GB, which protobuf alone cannot hold: written, mapped and run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from random_models import PLAIN, PLAIN_ATTENTION, random_decoder

import tfmx
from tfmx.export.options import ExportOptions
from tfmx.export.pipeline import export_model
from tfmx.export.source import CheckpointSource
from tfmx.tfm_model.checkpoint import Checkpoint, GenerationDefaults, LazyTensor
from tfmx.tfm_model.config import HeadConfig, TokenInputs

# Nearly all of it is the embedding and the head, of which every row but the last few is zero.
CONFIG = replace(
    PLAIN,
    inputs=TokenInputs(vocab_size=600_000),
    width=512,
    n_layers=1,
    head=HeadConfig(),
    mixer=replace(PLAIN_ATTENTION, head_dim=32, rotary=replace(PLAIN_ATTENTION.rotary, dim=32)),
)


@pytest.mark.slow
def test_a_bundle_of_more_than_2_gb_runs_as_pytorch_does(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("needs 8 GB of disk")
    small = random_decoder(replace(CONFIG, inputs=TokenInputs(vocab_size=100)))
    values = dict(small.named_parameters())

    def read(name: str) -> torch.Tensor:
        value = values[name].detach()
        if name not in {"embed.weight", "head.weight"}:
            return value
        grown = torch.zeros(CONFIG.vocab_size, value.shape[1])
        grown[-100:] = value  # the last bytes of the file are the ones that matter
        return grown

    shapes = {
        name: (CONFIG.vocab_size, 512) if name in {"embed.weight", "head.weight"} else p.shape
        for name, p in values.items()
    }
    tensors = {
        name: LazyTensor(name, tuple(shape), lambda name=name: read(name)) for name, shape in shapes.items()
    }
    checkpoint = Checkpoint(
        kind="huggingface", files=(), config=CONFIG, tensors=tensors, generation=GenerationDefaults()
    )
    export_model(
        CheckpointSource(checkpoint, ir.DataType.FLOAT),
        tmp_path / "bundle",
        ExportOptions(verify=False),
    )
    assert (tmp_path / "bundle" / "weights.bin").stat().st_size > 2**31
    ids = [3, 50, 99]
    state = [torch.zeros(1, 2, 0, 32) for _ in range(2)]
    with torch.no_grad():
        expected, _ = small(
            torch.tensor([ids]), torch.ones(1, 3, dtype=torch.int64), torch.arange(3)[None], state
        )
    with tfmx.load(tmp_path / "bundle") as model:
        offset = CONFIG.vocab_size - 100
        logits = torch.from_numpy(model.logits([offset + i for i in ids]))
    assert torch.allclose(logits[:, -100:], expected[0], atol=1e-4)
    assert (logits[:, :-100] == 0).all()

"""Export time and memory against depth: SmolLM2's shape with 8, 30 and 120 layers of random weights.

    python benchmarks/bench_export.py

Each export runs in a process of its own, unverified; the weights are drawn when they are written. `growth` is
what the process added to its memory after its imports (torch and onnx alone take some 400 MB).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS = (8, 30, 120)


def export_once(n_layers: int) -> dict[str, float]:
    import onnx_ir as ir
    import torch

    from tfmx.export.options import ExportOptions
    from tfmx.export.pipeline import export_model
    from tfmx.export.source import CheckpointSource
    from tfmx.export.trace import trace_decoder
    from tfmx.export.weights import torch_dtype
    from tfmx.tfm_model.checkpoint import Checkpoint, GenerationDefaults, LazyTensor
    from tfmx.tfm_model.config import (
        AttentionConfig,
        HeadConfig,
        MlpConfig,
        ModelConfig,
        NormConfig,
        RotaryConfig,
        TokenInputs,
    )
    from tfmx.tfm_model.transformer import Transformer

    config = ModelConfig(
        inputs=TokenInputs(vocab_size=49152),
        width=576,
        n_layers=n_layers,
        context=8192,
        norm=NormConfig(),
        mixer=AttentionConfig(n_heads=9, n_kv_heads=3, head_dim=64, rotary=RotaryConfig(dim=64, theta=1e5)),
        mlp=MlpConfig(hidden=1536),
        head=HeadConfig(tied=True),
    )
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
    tensors = {
        name: LazyTensor(name, shape, lambda shape=shape: torch.randn(shape))
        for name, shape in shapes.items()
    }
    checkpoint = Checkpoint(
        kind="huggingface", files=(), config=config, tensors=tensors, generation=GenerationDefaults()
    )
    before = peak()
    started = time.perf_counter()
    trace_decoder(config, torch_dtype(ir.DataType.FLOAT))
    traced = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bundle"
        export_model(CheckpointSource(checkpoint, ir.DataType.FLOAT), out, ExportOptions(verify=False))
        size = (out / "weights.bin").stat().st_size
    return {
        "layers": n_layers,
        "weights_mb": size / 1e6,
        "trace_s": traced - started,
        "total_s": time.perf_counter() - started,
        "peak_mb": peak(),
        "growth_mb": peak() - before,
    }


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(export_once(int(sys.argv[1]))))
        return
    print(
        "| layers | weights (MB) | trace (s) | whole export (s) | peak memory (MB) | of it after imports (MB) |"
    )
    print("|---|---|---|---|---|---|")
    for n_layers in LAYERS:
        done = subprocess.run(
            [sys.executable, __file__, str(n_layers)], check=True, capture_output=True, text=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {row['layers']} | {row['weights_mb']:.0f} | {row['trace_s']:.1f} | {row['total_s']:.1f} "
            f"| {row['peak_mb']:.0f} | {row['growth_mb']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

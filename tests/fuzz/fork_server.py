"""Imports everything once, makes no session, and forks a child for each mutant: `python fork_server.py KIND SEED PLACE`.

Mutants' numbers come on standard input, a JSON outcome goes to standard output for each. A child that outlives its time is
killed with all that it started. Time in which it wanted a core and got none (`/proc/PID/schedstat`) does not count.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.mutant import Mutant

HERE = Path(__file__).parent
LIMITS = {"bundles": 5.0, "checkpoints": 5.0}  # seconds of a mutant
_LONGEST = 60.0  # whatever the machine is busy with

Make = Callable[[int, Path], "Mutant"]


def main(kind: str, seed: int, place: Path) -> None:
    make, describe = (_bundles if kind == "bundles" else _checkpoints)(seed)
    gc.freeze()  # what is there now stays, and is shared with every child
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        index = int(line)
        folder = place / f"{kind}-{seed}-{index}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = _run(index, folder, make, kind)
        outcome["kind"] = outcome["kind"] or describe(index)  # it could not be made
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(outcome), flush=True)


def _bundles(seed: int) -> tuple[Make, Callable[[int], str]]:
    """What makes a mutant, and what names its kind beforehand."""
    _import(
        "fuzz.child numpy.random onnxruntime rich.progress PIL.PngImagePlugin tfmx.cli.answer tfmx.cli.apply tfmx.cli.chat "
        "tfmx.cli.inspect tfmx.cli.run tfmx.cli.verify tfmx.runtime.append_engine tfmx.runtime.capacity_engine "
        "tfmx.runtime.golden tfmx.runtime.images tfmx.runtime.loading"
    )
    from fuzz import bundle_mutants
    from fuzz.bases import base_folder, read_bases

    bases = read_bases(base_folder())
    return (
        lambda index, folder: bundle_mutants.make_mutant(seed, index, bases, folder),
        lambda index: bundle_mutants.kind_of(seed, index),
    )


def _checkpoints(seed: int) -> tuple[Make, Callable[[int], str]]:
    _import("fuzz.child tfmx.cli.export")
    import torch
    from fuzz import checkpoint_mutants
    from fuzz.bases import base_folder, read_checkpoints

    from tfmx.cli.boundary import run_guarded
    from tfmx.cli.entry import group

    torch.set_num_threads(1)
    bases = read_checkpoints(base_folder())
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
        # torch.onnx imports most of itself at the first export, and collects its translations: once is enough
        run_guarded(group, ["export", "preset:decoder", "-o", f"{out}/bundle", "--no-verify"])
    return (
        lambda index, folder: checkpoint_mutants.make_mutant(seed, index, bases, folder),
        lambda index: checkpoint_mutants.kind_of(seed, index, bases),
    )


def _import(modules: str) -> None:
    """Now, so that no child has to."""
    for module in modules.split():
        importlib.import_module(module)


def _run(index: int, folder: Path, make: Make, kind: str) -> dict[str, object]:
    from fuzz.outcomes import GENERATOR, HANG, killed, worst

    child = os.fork()
    if child == 0:
        _be_the_child(index, folder, make)
    status = _wait(child, LIMITS[kind])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started
    made, command, found = _read_steps(folder / "steps")
    if made is None:
        found.append((GENERATOR, _text(folder / "fault") or f"the child ended with {status}"))
    elif status is None:
        found.append((HANG, f"{command}: killed after {LIMITS[kind]:g} s"))
    elif os.WIFSIGNALED(status):
        found.append(killed(os.WTERMSIG(status), command))
    elif os.WEXITSTATUS(status):
        found.append((GENERATOR, f"{command}: the child failed: {_text(folder / 'fault')}"))
    verdict, detail = worst(found)
    name, base, what = made or ("", "", "")
    return {"index": index, "kind": name, "base": base, "what": what, "verdict": verdict, "detail": detail}


def _be_the_child(index: int, folder: Path, make: Make) -> None:
    from fuzz.child import Steps, limit_child, run_commands

    try:
        os.setsid()
        gc.disable()  # the child ends soon
        steps = Steps(folder / "steps")
        mutant = make(index, folder / "mutant")
        steps.write(made=(mutant.kind, mutant.base, mutant.what))
        limit_child()
        run_commands(mutant.commands, folder, steps)
        os._exit(0)
    except BaseException:  # noqa: BLE001 (nothing of the child may go on in the parent's loop)
        (folder / "fault").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def _wait(child: int, limit: float) -> int | None:
    """The child's status, or None: it was killed, for it took longer."""
    started, descriptor = time.monotonic(), os.pidfd_open(child)
    try:
        while True:
            ended, _, _ = select.select([descriptor], [], [], 0.25)
            if ended:
                return os.waitpid(child, 0)[1]
            passed = time.monotonic() - started
            if passed - _waited(child) > limit or passed > _LONGEST:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
    finally:
        os.close(descriptor)


def _waited(process: int) -> float:
    """Seconds for which a thread of it was ready to run and another process had the core."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def _read_steps(path: Path) -> tuple[tuple[str, str, str] | None, str, list[tuple[str, str]]]:
    made, command, found = None, "", []
    for line in _text(path).splitlines():
        entry = json.loads(line)
        made = tuple(entry["made"]) if "made" in entry else made
        command = entry.get("command", command)
        found += [tuple(entry["found"])] if "found" in entry else []
    return made, command, found  # type: ignore[return-value]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)  # not this folder: its files are `fuzz.…`
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

"""Imports everything once, makes no session, and forks a child for each mutant: `python fork_server.py KIND SEED PLACE`.

Mutants' numbers come on standard input, a JSON outcome goes to standard output for each. A child that outlives its time is
killed with all that it started. Time in which it wanted a core and got none (`/proc/PID/schedstat`) does not count.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
LIMITS = {"bundles": 5.0, "checkpoints": 5.0}  # seconds of a mutant
_LONGEST = 60.0  # whatever the machine is busy with

Make = Callable[[int, Path], tuple[str, str, str, list[tuple[str, ...]]]]


def main(kind: str, seed: int, place: Path) -> None:
    make, describe, twice = _load(kind, seed)
    gc.freeze()  # what is there now stays, and is shared with every child
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        index = int(line)
        folder = place / f"{kind}-{seed}-{index}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = _run(index, folder, make, kind, twice=twice)
        if not outcome["kind"]:
            outcome["kind"] = describe(seed, index)
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(outcome), flush=True)


def _load(kind: str, seed: int) -> tuple[Make, Callable[[int, int], str], bool]:
    """What makes a mutant of this kind, what names its kind, and whether what runs is to run twice."""
    import click  # noqa: F401
    import tfmx.cli.inspect
    import tfmx.cli.run
    import tfmx.cli.verify
    import tfmx.runtime.golden
    import tfmx.runtime.loading  # noqa: F401
    from rich.progress import Progress  # noqa: F401

    if kind == "bundles":
        import numpy.random  # noqa: F401
        import onnxruntime  # noqa: F401
        import tfmx.cli.answer
        import tfmx.cli.apply  # noqa: F401
        from fuzz import bundle_mutants
        from fuzz.bases import base_folder, read_bases

        bases = read_bases(base_folder())

        def make(index: int, folder: Path) -> tuple[str, str, str, list[tuple[str, ...]]]:
            mutant = bundle_mutants.make_mutant(seed, index, bases, folder / "bundle")
            return mutant.kind, mutant.base, mutant.what, list(mutant.commands)

        return make, bundle_mutants.kind_of, True
    raise SystemExit(f"there are no mutants of kind {kind}")


def _run(index: int, folder: Path, make: Make, kind: str, *, twice: bool) -> dict[str, object]:
    from fuzz.outcomes import GENERATOR, HANG, killed, worst

    child = os.fork()
    if child == 0:
        _be_the_child(index, folder, make, twice=twice)
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


def _be_the_child(index: int, folder: Path, make: Make, *, twice: bool) -> None:
    from fuzz.child import Steps, limit_child, run_commands

    try:
        os.setsid()
        steps = Steps(folder / "steps")
        name, base, what, commands = make(index, folder)
        steps.write(made=(name, base, what))
        limit_child()
        run_commands(commands, folder, steps, twice=twice)
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

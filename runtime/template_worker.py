"""Renders chat templates in a process of its own; `chat.py` starts it and speaks with it over pipes.

Jinja's sandbox stops code, not CPU or memory: two nested loops or a doubling string would hang or exhaust
the whole program. Here they end this process. It imports only jinja2 and the standard library, and `chat.py`,
which shares the reading and writing of messages, not even jinja2.

A message, either way, is 8 bytes of length and that much JSON.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MEMORY = 512 << 20  # bytes of address space
CPU_SECONDS = 4  # for a render that outlives its parent


def limit_process() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def limit_cpu() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def read_message(stream: BinaryIO) -> Any:
    """The next message, or None at the end."""
    head = stream.read(8)
    return json.loads(stream.read(struct.unpack(">Q", head)[0])) if len(head) == 8 else None


def write_message(stream: BinaryIO, message: Any) -> None:
    data = json.dumps(message).encode()
    stream.write(struct.pack(">Q", len(data)) + data)
    stream.flush()


def serve(render: Callable[[str, dict[str, Any]], str], requests: BinaryIO, replies: BinaryIO) -> None:
    write_message(replies, {"ready": True})
    while (request := read_message(requests)) is not None:
        limit_cpu()
        try:
            reply = {"text": render(request["template"], request["variables"])}
        except MemoryError:
            reply = {"error": "it uses too much memory"}
        except Exception as error:  # noqa: BLE001 (whatever a template does wrong is told to the user)
            reply = {"error": " ".join(str(error).split()) or type(error).__name__}
        write_message(replies, reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    limit_process()
    sandbox = runpy.run_path(str(Path(__file__).with_name("template_sandbox.py")))
    serve(sandbox["render"], sys.stdin.buffer, sys.stdout.buffer)

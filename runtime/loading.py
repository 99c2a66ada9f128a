"""`tfmx.load`: from a folder to a model that is ready to run, as soon as two cores can.

Python's lock is what counts: while a session is made (most of the time, packing its weights) it is free, so the files' sums
and the tokenizer come beside that. Before, there is one thread: another would wait for the lock again and again.
"""

from __future__ import annotations

import importlib
import os

from .. import InputError
from .address_space import free_address_space
from .beside import Beside
from .bundle import Bundle
from .devices import DeviceName, choose_device
from .engine import Graphs
from .memory import give_back_freed, give_back_read
from .model import Model
from .tokenizer import Tokenizer


def load(
    path: str | os.PathLike[str],
    *,
    device: DeviceName = "cpu",
    threads: int | None = None,
    check: bool = True,
) -> Model:
    """Open a bundle and make it ready to run.

    `device`: "cpu", "cuda" (an error where it cannot be had) or "auto". `threads`: for one run; None takes
    the physical cores. `check=False` skips the sha256 sums of the files (0.7 s a GiB).
    """
    if threads is not None and not 1 <= threads <= 1024:  # onnxruntime would make them all, however many
        raise InputError(f"threads is {threads}; it must be 1 to 1024")
    bundle = Bundle.look(path, check=check)
    chosen = choose_device(device, bundle)
    for role in bundle.manifest.used_graphs:
        bundle.graph(role)  # read and audited while there is one thread
    bundle.check_weights_size()
    beside = Beside(lambda: _check_and_read_tokenizer(bundle))
    if free_address_space() is not None:
        beside.result()  # first: a tokenizer that gets no memory ends the process, whoever has taken it
    try:
        graphs = Graphs(bundle, chosen, threads=threads)
    except Exception:  # not Ctrl-C, which need not wait for the sums
        beside.result()  # a changed file is the better explanation
        raise
    tokenizer = beside.result()
    give_back_read(bundle)
    return Model(bundle, graphs, tokenizer)


def _check_and_read_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """What takes long while a session is made. The sums first: they need Python's lock least, and so hold nobody up."""
    bundle.check_sums()
    data = bundle.read("tokenizer.json")
    tokenizer = None if data is None else Tokenizer(data)
    # Samplers need it. In this thread, for Ctrl-C comes to the main one, and Cython's modules swallow it while they are imported.
    importlib.import_module("numpy.random")
    give_back_freed()
    return tokenizer

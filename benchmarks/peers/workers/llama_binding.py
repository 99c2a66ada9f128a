"""The ctypes half of llama-cpp-python, without the package's own `__init__`.

That one imports the high-level half (chat templates, caches, a server's types), which nothing here uses and which would
be counted as llama.cpp's start.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# The log callback must outlive every call.
_keep: list[Any] = []


def load_binding() -> Any:
    if _keep:
        return sys.modules["llama_cpp.llama_cpp"]
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None, "llama-cpp-python is not installed here"
    assert spec.origin is not None
    package = ModuleType("llama_cpp")
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["llama_cpp"] = package
    binding = importlib.import_module("llama_cpp.llama_cpp")
    silent = binding.llama_log_callback(lambda *_: None)
    _keep.append(silent)
    binding.llama_log_set(silent, None)
    binding.llama_backend_init()
    return binding


class Context:
    """One model and one sequence."""

    def __init__(self, path: str, threads: int, capacity: int, cache: str | None = None) -> None:
        """`cache`: the type of its numbers, such as F32 or Q8_0; None: llama.cpp's own choice."""
        self.binding = binding = load_binding()
        self.model = binding.llama_model_load_from_file(path.encode(), binding.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = binding.llama_context_default_params()
        params.n_ctx = -(-capacity // 256) * 256  # what it rounds up to anyway
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        if cache is not None:
            params.type_k = params.type_v = getattr(binding, f"GGML_TYPE_{cache}")
        self.context = binding.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = binding.llama_get_memory(self.context)
        self.batch = binding.llama_batch_init(capacity, 0, 1)
        self.vocab_size = binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(self.model))
        self.length = 0

    def forget(self) -> None:
        self.binding.llama_memory_clear(self.memory, False)
        self.length = 0

    def decode(self, tokens: list[int], *, every: bool = False) -> None:
        """Append tokens; the last position's logits are computed, or every position's."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == count - 1
        found = self.binding.llama_decode(self.context, batch)
        if found != 0:
            raise RuntimeError(f"llama_decode gave {found}, wanted 0")
        self.length += count

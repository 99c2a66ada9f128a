"""`tfmx.load`: a bundle ready to generate, from text, ids, batches or chat messages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .. import InputError
from .bundle import Bundle
from .chat import ChatTemplate, Message
from .devices import Device, DeviceName, choose_device
from .engine import Engine, Graphs, open_engine
from .generate import FinishReason, Statistics, Step, make_row, run_rows
from .manifest import Manifest
from .sampling import SamplingOptions, fresh_seed
from .tokenizer import PromptError, Tokenizer

Prompt = str | Sequence[int]  # text, or token ids

_GREEDY = SamplingOptions()
_ROOM = 256  # new tokens that a cache is first made for when no number is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All steps of one row."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float | None, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    seed: int
    statistics: Statistics  # of the whole batch


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
    bundle = Bundle.open(path, check=check)
    return Model(bundle, Graphs(bundle, choose_device(device, bundle), threads=threads))


class Model:
    """A bundle on a device. Thread-safe; several generations may run at once, each with its own cache."""

    def __init__(self, bundle: Bundle, graphs: Graphs) -> None:
        self.bundle = bundle
        self.manifest: Manifest = bundle.manifest
        self.device: Device = graphs.device
        tokenizer = bundle.read("tokenizer.json")
        self.tokenizer = Tokenizer(tokenizer) if tokenizer is not None else None
        self.template = _make_template(bundle, self.tokenizer)
        self._graphs: Graphs | None = graphs
        self._kept: tuple[Engine, list[int]] | None = None  # the last chat's cache, and the tokens in it
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the weights and caches back; generations under way may finish."""
        self._graphs = self._kept = None

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        parse_special: bool = False,
    ) -> Iterator[Step]:
        """Continue a text or token ids, one step a token.

        The prompt is checked at once, the model runs as steps are taken. `max_new_tokens` goes before the one
        of `sampling`. `parse_special`: the text spells special tokens out, as hand-written templates do.
        """
        return self.stream_batch(
            [prompt], sampling, max_new_tokens=max_new_tokens, parse_special=parse_special
        )

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        parse_special: bool = False,
    ) -> Iterator[Step]:
        """Continue several prompts together; a step's `row` says whose it is. Each row draws from the same seed."""
        started = time.perf_counter()
        options = self._options(sampling, max_new_tokens)
        rows = self._prompt_ids(prompts, parse_special)
        return self._stream(rows, options, started)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        parse_special: bool = False,
    ) -> list[Result]:
        """The whole answers to several prompts, in their order."""
        started = time.perf_counter()
        options = self._options(sampling, max_new_tokens)
        rows = self._prompt_ids(prompts, parse_special)
        return _collect(rows, list(self._stream(rows, options, started)))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Iterator[Step]:
        """Answer a conversation: [{"role": "user", "content": "..."}, ...].

        Give the whole history each time: what it shares with the last call is still in the cache.
        """
        started = time.perf_counter()
        options = self._options(sampling, max_new_tokens)
        prompt_ids = self.chat_ids(messages, tools=tools)
        self._check_ids(prompt_ids, "the prompt")
        return self._stream_chat(prompt_ids, options, started)

    def chat_ids(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[int]:
        """The prompt that `chat` gives the model."""
        if self.template is None or self.tokenizer is None:
            raise PromptError("this bundle has no chat template; give it a plain prompt")
        return self.template.encode(self.tokenizer, messages, tools=tools)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids that `generate` makes of a text."""
        if self.tokenizer is None:
            raise PromptError("this bundle has no tokenizer; give token ids")
        if len(text) > 4 * self.manifest.max_context:  # refuse a hopeless text before seconds of work on it
            least = len(text) // self.tokenizer.longest_token()
            if least > self.manifest.max_context:
                raise PromptError(
                    f"the prompt has at least {least} tokens, the context holds {self.manifest.max_context}"
                )
        return self.tokenizer.encode(text, parse_special=parse_special)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits of every position, (T, V): for tests and scoring."""
        ids = [int(token_id) for token_id in token_ids]
        self._check_ids(ids, "the prompt")
        return open_engine(self._open_graphs(), 1, len(ids)).score(ids)

    # --- how it is done ----------------------------------------------------------------------------------

    def _stream(self, prompts: list[list[int]], options: SamplingOptions, started: float) -> Iterator[Step]:
        seed = fresh_seed() if options.seed is None else options.seed
        decode = self.tokenizer.decode if self.tokenizer else None
        rows = [
            make_row(self.manifest, index, ids, options, seed, decode, context=ids)
            for index, ids in enumerate(prompts)
        ]
        room = (
            min(_ROOM, max(row.limit for row in rows))
            if options.max_new_tokens is None
            else options.max_new_tokens
        )
        engine = open_engine(self._open_graphs(), len(rows), max(map(len, prompts)) + room)
        yield from run_rows(engine, rows, options, seed, started=started)

    def _stream_chat(self, prompt_ids: list[int], options: SamplingOptions, started: float) -> Iterator[Step]:
        seed = fresh_seed() if options.seed is None else options.seed
        decode = self.tokenizer.decode if self.tokenizer else None
        row = make_row(self.manifest, 0, prompt_ids, options, seed, decode, context=())
        engine, cached = self._take_kept(prompt_ids, options.max_new_tokens or _ROOM)
        try:
            yield from run_rows(engine, [row], options, seed, started=started, cached=cached)
        finally:  # also after Ctrl-C: a step that failed left the engine as it was
            tokens = prompt_ids + row.token_ids
            with self._lock:
                if self._graphs is not None:
                    self._kept = engine, tokens[: engine.lengths[0]]

    def _take_kept(self, prompt_ids: list[int], room: int) -> tuple[Engine, int]:
        """The last chat's engine, cut to what the prompt shares with it, or a new one."""
        with self._lock:
            kept, self._kept = self._kept, None  # taken: two chats at once must not share it
        if kept is not None:
            engine, tokens = kept
            pairs = enumerate(zip(tokens, prompt_ids, strict=False))
            shared = next(
                (place for place, (old, new) in pairs if old != new), min(len(tokens), len(prompt_ids))
            )
            shared = min(shared, len(prompt_ids) - 1)  # the last token's logits are needed
            if shared and (shared == len(tokens) or engine.can_trim):
                if shared < len(tokens):
                    engine.trim(shared)
                return engine, shared
        return open_engine(self._open_graphs(), 1, len(prompt_ids) + room), 0

    def _open_graphs(self) -> Graphs:
        if self._graphs is None:
            raise ValueError("the model is closed")
        return self._graphs

    def _options(self, sampling: SamplingOptions | None, max_new_tokens: int | None) -> SamplingOptions:
        options = sampling if sampling is not None else _GREEDY
        if max_new_tokens is not None:
            options = replace(options, max_new_tokens=max_new_tokens)
        options.check_vocabulary(self.manifest.vocab_size)
        if options.stop and self.tokenizer is None:
            raise PromptError("this bundle has no tokenizer, so it cannot look for stop texts")
        return options

    def _prompt_ids(self, prompts: Sequence[Prompt], parse_special: bool) -> list[list[int]]:
        if not prompts:
            raise PromptError("there are no prompts")
        rows = []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                ids = self.encode(prompt, parse_special=parse_special)
            else:
                ids = [int(token_id) for token_id in prompt]
            self._check_ids(ids, "the prompt" if len(prompts) == 1 else f"prompt {index}")
            rows.append(ids)
        return rows

    def _check_ids(self, ids: list[int], what: str) -> None:
        """Guards that onnxruntime does not give: -1 would wrap around, a bad id can read zeros."""
        if not ids:
            raise PromptError(f"{what} is empty")
        vocab_size, context = self.manifest.vocab_size, self.manifest.max_context
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                raise PromptError(
                    f"token {token_id} at place {place} of {what} is outside the vocabulary of {vocab_size}"
                )
        if len(ids) > context:
            raise PromptError(f"{what} has {len(ids)} tokens, the context holds {context}")


def _make_template(bundle: Bundle, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    source = bundle.read("chat_template.jinja")
    if source is None or tokenizer is None:
        return None
    generation = bundle.manifest.generation
    ids = {"bos_token": generation.bos_token_id, "pad_token": generation.pad_token_id}
    ids["eos_token"] = next(iter(generation.eos_token_ids), None)
    names = {name: tokenizer.token(token_id) for name, token_id in ids.items() if token_id is not None}
    specials = {name: token for name, token in names.items() if token is not None}
    return ChatTemplate(source.decode("utf-8", "replace"), specials)


def _collect(prompts: list[list[int]], steps: list[Step]) -> list[Result]:
    results = []
    for index, prompt_ids in enumerate(prompts):
        own = [step for step in steps if step.row == index]
        reason = own[-1].finish_reason
        assert reason is not None
        results.append(
            Result(
                prompt_ids=tuple(prompt_ids),
                token_ids=tuple(step.token_id for step in own),
                text="".join(step.text for step in own),
                finish_reason=reason,
                logprobs=tuple(step.logprob for step in own),
                top_logprobs=tuple(step.top_logprobs for step in own),
                seed=own[-1].seed,
                statistics=steps[-1].statistics,
            )
        )
    return results

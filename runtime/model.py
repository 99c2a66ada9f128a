"""A bundle ready to generate, from text, ids, batches or chat messages, or to be applied to inputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .. import InputError, TfmxError
from .apply import Outputs, apply_decoder, apply_encoder, apply_encoder_decoder
from .bundle import Bundle
from .chat import open_template
from .devices import Device
from .draft_length import RunCosts
from .drafters import Drafter
from .encoder import encode
from .engine import Engine, Graphs, open_engine
from .generate import Result, Row, Step, collect_results, make_row, run_rows
from .inputs import Array, Input, InputReader, check_ids, whole_numbers
from .manifest import Manifest
from .messages import Messages
from .sampling import SamplingError, SamplingOptions, fresh_seed
from .speculation import Speculation, SpeculationError, SpeculativeEngine, check_speculation, open_drafter
from .tokenizer import PromptError, Tokenizer

__all__ = ["Model", "Result"]

_GREEDY = SamplingOptions()
_ROOM = 256  # new tokens that a cache is first made for when no number is given
_MOST_ROOM = 2048  # and when one is: the cache grows by itself, and a large one is prefilled in small chunks


class ModelClosedError(TfmxError):
    """The model was closed, and is asked for more."""


class Model:
    """A bundle on a device. Thread-safe; several generations may run at once, each with its own cache."""

    def __init__(self, bundle: Bundle, graphs: Graphs, tokenizer: Tokenizer | None) -> None:
        self.bundle = bundle
        self.manifest: Manifest = bundle.manifest
        self.device: Device = graphs.device
        self.tokenizer = tokenizer
        self.template = open_template(bundle, self.tokenizer)
        self._reader = InputReader(bundle.manifest, self.tokenizer)
        self._graphs: Graphs | None = graphs
        self._kept: tuple[Engine, list[int]] | None = None  # the last chat's cache, and the tokens in it
        self._lock = threading.Lock()
        self._speculation: Speculation | None = None
        self._costs = RunCosts()

    def __repr__(self) -> str:
        manifest = self.manifest
        numbers = manifest.dtype if manifest.quant is None else manifest.quant.weights
        closed = ", closed" if self._graphs is None else ""
        return (
            f"<tfmx.Model {self._name}: {manifest.kind}, {manifest.target}, {numbers}, "
            f"context {manifest.max_context:,}, on {self.device.kind}{closed}>"
        )

    def __enter__(self) -> Self:
        self._open_graphs()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the weights and caches back; answers that have begun may finish. A second time it does nothing."""
        with self._lock:  # or an answer that ends just now could leave its cache behind
            self._graphs = self._kept = None

    def speculate(self, speculation: Speculation | None) -> None:
        """From now on guess tokens and check several in one run, for single prompts; None ends it.

        In float bundles the tokens stay the same; with 8-bit activations they may leave those of plain decoding. It pays where
        an answer repeats its prompt, or with a draft model.
        """
        self._open_graphs()
        if speculation is not None:
            check_speculation(speculation, self)
        self._speculation = speculation

    def generate(
        self,
        prompt: Input,
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        parse_special: bool = False,
    ) -> Iterator[Step]:
        """Continue a text or token ids, one step a token; an encoder-decoder answers its source.

        The prompt is checked at once, the model runs as steps are taken. `max_new_tokens` goes before the one
        of `sampling`. `parse_special`: the text spells special tokens out, as hand-written templates do.
        """
        return self.stream_batch(
            [prompt], sampling, max_new_tokens=max_new_tokens, parse_special=parse_special
        )

    def stream_batch(
        self,
        prompts: Sequence[Input],
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        parse_special: bool = False,
    ) -> Iterator[Step]:
        """Continue several prompts together; a step's `row` says whose it is. Each row draws from the same seed."""
        options = self._options(sampling, max_new_tokens)
        return self._begin(prompts, options, parse_special=parse_special)[1]

    def generate_batch(
        self,
        prompts: Sequence[Input],
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        parse_special: bool = False,
    ) -> list[Result]:
        """The whole answers to several prompts, in their order."""
        options = self._options(sampling, max_new_tokens)
        if isinstance(prompts, str):  # a sequence of its letters
            raise PromptError("prompts is one text, wanted a list of prompts")
        rows, steps = self._begin(prompts, options, parse_special=parse_special)
        return collect_results(rows, list(steps))

    def chat(
        self,
        messages: Messages,
        sampling: SamplingOptions | None = None,
        *,
        max_new_tokens: int | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Iterator[Step]:
        """Answer a conversation: [{"role": "user", "content": "..."}, ...], or a text that the user says.

        Give the whole history each time: what it shares with the last call is still in the cache.
        """
        started = time.perf_counter()
        options = self._options(sampling, max_new_tokens)
        prompt = self._reader.read(self.chat_ids(messages, tools=tools), "the conversation")
        if self.manifest.kind == "encoder-decoder":
            return self._stream([prompt], options, started, self._speculation)
        return self._stream_chat(prompt.tolist(), options, started, self._speculation)

    def chat_ids(self, messages: Messages, *, tools: Sequence[Any] | None = None) -> list[int]:
        """The prompt that `chat` gives the model."""
        self._open_graphs()
        if self.template is None or self.tokenizer is None:
            raise PromptError("this bundle has no chat template; give it a plain prompt")
        return self.template.encode(self.tokenizer, messages, tools=tools)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The ids that `generate` makes of a text."""
        self._open_graphs()
        return self._reader.encode(text, parse_special=parse_special)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits of every position, (T, V): for tests and scoring."""
        graphs = self._open_graphs()
        self._check_generates()
        if self.manifest.kind == "encoder-decoder":
            raise InputError("this bundle is an encoder-decoder; apply(source, target=...) gives its logits")
        ids = self._reader.read(token_ids, "the prompt")
        return open_engine(graphs, 1, len(ids)).score(ids)["logits"]

    def apply(self, inputs: Input, *, target: Sequence[int] | None = None) -> Outputs:
        """Run one input through, for every output by its name: the main one, and attention maps if the bundle has them.

        Any kind of bundle. Tokens: text or ids; vectors: (T, F); images: a path, a Pillow image or normalised
        floats (C, H, W). `target`: what the decoder of an encoder-decoder has said so far, without its start token.
        """
        return self.apply_batch([inputs], targets=None if target is None else [target])[0]

    def apply_batch(
        self, inputs: Sequence[Input], *, targets: Sequence[Sequence[int]] | None = None
    ) -> list[Outputs]:
        """The same for several, of different lengths; an encoder runs them together."""
        graphs = self._open_graphs()
        rows = self._read(inputs, "input")
        if self.manifest.kind == "encoder-decoder":
            starts = self._targets([()] * len(rows) if targets is None else targets, len(rows))
            pairs = zip(rows, starts, strict=True)
            return [apply_encoder_decoder(graphs, row, target) for row, target in pairs]
        if targets is not None:
            raise InputError(f"a target is for an encoder-decoder; {self._what()}")
        if self.manifest.kind == "encoder":
            return apply_encoder(graphs, rows)
        return [apply_decoder(graphs, row) for row in rows]

    # --- how it is done ----------------------------------------------------------------------------------

    def _begin(
        self, prompts: Sequence[Input], options: SamplingOptions, *, parse_special: bool
    ) -> tuple[list[Array], Iterator[Step]]:
        """The prompts as they were read, and the steps that answer them."""
        started, speculation = time.perf_counter(), self._speculation
        if speculation is not None and len(prompts) > 1:
            raise SpeculationError(
                f"speculation is for one prompt at a time, here are {len(prompts)}; end it with speculate(None)"
            )
        rows = self._read(prompts, "prompt", parse_special=parse_special)
        return rows, self._stream(rows, options, started, speculation)

    def _stream(
        self, prompts: list[Array], options: SamplingOptions, started: float, speculation: Speculation | None
    ) -> Iterator[Step]:
        seed = fresh_seed() if options.seed is None else options.seed
        graphs = self._open_graphs()
        if self.manifest.kind == "encoder-decoder":
            encoded = encode(graphs, prompts, self.manifest.fixed_outputs)
            starts = self._targets([()] * len(prompts), len(prompts))
        else:
            encoded, starts = None, [prompt.tolist() for prompt in prompts]
        rows = [
            make_row(self.manifest, index, ids, options, seed, self.tokenizer, context=ids)
            for index, ids in enumerate(starts)
        ]
        room = _first_room(options)
        engine = open_engine(graphs, len(rows), max(map(len, starts)) + room, encoded)
        drafter = self._open_drafter(rows, room, speculation, prompts if encoded is not None else ())
        if drafter is not None:
            engine = SpeculativeEngine(engine, drafter, self._costs, rows[0].end)
        source_tokens = 0 if encoded is None else int(encoded.mask.sum())
        yield from run_rows(engine, rows, options, seed, started=started, source_tokens=source_tokens)

    def _stream_chat(
        self, prompt_ids: list[int], options: SamplingOptions, started: float, speculation: Speculation | None
    ) -> Iterator[Step]:
        seed = fresh_seed() if options.seed is None else options.seed
        row = make_row(self.manifest, 0, prompt_ids, options, seed, self.tokenizer, context=())
        room = _first_room(options)
        drafter = self._open_drafter([row], room, speculation)  # first: if it fails, the cache is still kept
        engine, cached = self._take_kept(prompt_ids, room)
        running = engine if drafter is None else SpeculativeEngine(engine, drafter, self._costs, row.end)
        try:
            yield from run_rows(running, [row], options, seed, started=started, cached=cached)
        finally:  # also after Ctrl-C: a step that failed left the engine as it was
            tokens = prompt_ids + row.token_ids
            if engine.lengths[0] > running.lengths[0]:  # it holds guesses
                engine.trim(running.lengths[0])
            with self._lock:
                if self._graphs is not None:
                    self._kept = engine, tokens[: engine.lengths[0]]

    def _open_drafter(
        self, rows: list[Row], room: int, speculation: Speculation | None, sources: Sequence[Array] = ()
    ) -> Drafter | None:
        """What guesses for the one row, and has read its prompt. `sources`: of an encoder-decoder."""
        if speculation is None:
            return None
        [row], manifest = rows, self.manifest
        draft = None if speculation.draft is None else speculation.draft._open_graphs()  # noqa: SLF001 (its own class)
        may_copy = manifest.inputs.vocab_size == manifest.vocab_size  # source and answer have the same tokens
        source = [token for ids in sources for token in ids.tolist()] if may_copy else []
        return open_drafter(draft, row.prompt_ids, len(row.prompt_ids) + room, source)

    def _take_kept(self, prompt_ids: list[int], room: int) -> tuple[Engine, int]:
        """The last chat's engine, cut to what the prompt shares with it, or a new one."""
        with self._lock:
            kept, self._kept = self._kept, None  # taken: two chats at once must not share it
        if kept is not None:
            engine, tokens = kept
            pairs = enumerate(zip(tokens, prompt_ids, strict=False))
            differing = (place for place, (old, new) in pairs if old != new)
            shared = min(next(differing, len(tokens)), len(prompt_ids) - 1)  # the last token is to be run
            if shared and (shared == len(tokens) or engine.can_trim):
                if shared < len(tokens):
                    engine.trim(shared)
                return engine, shared
        return open_engine(self._open_graphs(), 1, len(prompt_ids) + room), 0

    def _open_graphs(self) -> Graphs:
        graphs = self._graphs  # once: another thread may close it
        if graphs is None:
            raise ModelClosedError(f"the model {self._name} was closed; load it again")
        return graphs

    @property
    def _name(self) -> str:
        """The bundle's folder, however it was given."""
        path = self.bundle.path
        return path.name or path.resolve().name  # "." has none

    def _options(self, sampling: SamplingOptions | None, max_new_tokens: int | None) -> SamplingOptions:
        self._open_graphs()
        vocab_size = self._check_generates()
        options = sampling if sampling is not None else _GREEDY
        if not isinstance(options, SamplingOptions):
            raise SamplingError(f"sampling is a {type(options).__name__}; it must be SamplingOptions(...)")
        if max_new_tokens is not None:
            options = replace(options, max_new_tokens=max_new_tokens)
        options.check_vocabulary(vocab_size)
        if options.stop and self.tokenizer is None:
            raise PromptError("this bundle has no tokenizer, so it cannot look for stop texts")
        return options

    def _check_generates(self) -> int:
        """How many tokens it chooses from."""
        if not self.manifest.generates or self.manifest.vocab_size is None:
            raise InputError(f"{self._what()}: it does not generate; call apply")
        return self.manifest.vocab_size

    def _what(self) -> str:
        kind, takes, gives = self.manifest.kind, self.manifest.inputs.kind, self.manifest.outputs.kind
        return f"this bundle is a{'n' * kind.startswith('e')} {kind} that takes {takes} and gives {gives}"

    def _read(self, inputs: Sequence[Input], noun: str, *, parse_special: bool = False) -> list[Array]:
        if len(inputs) == 0:  # it may be an array
            raise PromptError(f"there are no {noun}s")
        return [
            self._reader.read(
                value, f"the {noun}" if len(inputs) == 1 else f"{noun} {index}", parse_special=parse_special
            )
            for index, value in enumerate(inputs)
        ]

    def _targets(self, targets: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """What the decoder of an encoder-decoder reads: its start token, and the rest."""
        if len(targets) != count:
            raise InputError(f"there are {count} inputs and {len(targets)} targets")
        start, vocab_size = self.manifest.generation.decoder_start_token_id, self.manifest.vocab_size
        assert start is not None
        assert vocab_size is not None
        rows = [[start, *whole_numbers(target, "the target")] for target in targets]
        for row in rows:
            check_ids(row, "the target (with its start token)", vocab_size, self.manifest.max_context)
        return rows


def _first_room(options: SamplingOptions) -> int:
    """New tokens that a cache is first made for."""
    return _ROOM if options.max_new_tokens is None else min(options.max_new_tokens, _MOST_ROOM)

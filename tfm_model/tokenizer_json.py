"""Checks that a tokenizer.json is one that the runtime will be able to load."""

from __future__ import annotations

from tokenizers import Tokenizer

from .checkpoint import CheckpointError


def check_tokenizer(text: str, where: str) -> Tokenizer:
    """The tokenizer in the text, or CheckpointError that says where it stands."""
    try:
        return Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{where} is not a tokenizer that can be loaded: {reason}") from error

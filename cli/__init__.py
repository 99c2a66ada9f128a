"""The `tfmx` command.

Importing it loads click and nothing else of weight: each command imports what it needs when it runs, so that
`tfmx --help` answers at once and `tfmx run` works where torch is not installed.
"""

from .entry import main

__all__ = ["main"]

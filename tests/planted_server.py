"""The fuzzer's fork server, with a check of tfmx taken out: `python planted_server.py FAULT KIND SEED PLACE`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent)


def pipes_are_opened() -> None:
    """Reading one never ends; with a limit of a second, as each costs the whole of it."""
    from fuzz import fork_server

    from tfmx.runtime import bundle

    bundle._plain_size = lambda path: path.stat().st_size
    fork_server.LIMITS["bundles"] = 1.0


def contracts_are_not_held() -> None:
    """Every operator of the table gets whatever a graph gives it."""
    from tfmx.runtime.audit.walk import Walk

    Walk.check = lambda _self: None


def manifests_are_not_checked() -> None:
    from tfmx.runtime import manifest

    manifest.check_manifest = lambda _: None


def nothing_is_written() -> None:
    """Buffers begin as they are found, and the prefill that would fill that of the logits is not run."""
    import numpy as np

    from tfmx.runtime import device_buffer
    from tfmx.runtime.session import Session

    device_buffer._aligned_zeros = np.empty
    Session.run = lambda _self, _binding, *, shrink=False: None


FAULTS = {
    fault.__name__: fault
    for fault in (pipes_are_opened, contracts_are_not_held, manifests_are_not_checked, nothing_is_written)
}

if __name__ == "__main__":
    from fuzz.fork_server import main

    FAULTS[sys.argv[1]]()
    main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))

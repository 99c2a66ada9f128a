"""The operators that bundles may contain: export checks what it writes, the runtime what it opens.

An operator that is not in the table of contracts never reaches onnxruntime: some crash it while it loads (a 97-byte model
with DepthToSpace and a block size of 2^32 ends in SIGFPE), others while they run.
"""

from __future__ import annotations

from .. import InputError

# The opset versions that may be imported: 17 and 18 run everywhere, 24 is the newest that was probed.
OPSETS: dict[str, range] = {"": range(17, 25), "com.microsoft": range(1, 2)}


def check_opset(found: int) -> None:
    known = OPSETS[""]
    if found not in known:
        raise InputError(f"--opset is {found}, wanted {known.start} to {known.stop - 1}")

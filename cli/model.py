"""Opens a bundle to run, and says where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .console import say
from .progress import Bars

if TYPE_CHECKING:
    from ..runtime.devices import Device
    from ..runtime.model import Model

DeviceName = Literal["cpu", "cuda", "auto"]
_IMPORTS = (
    112 << 20
)  # bytes of address space: numpy and tokenizers; with less numpy ends the process in its own words


def open_model(bundle: str, device: DeviceName, threads: int | None, *, check: bool) -> Model:
    with Bars() as progress:
        progress.stage(f"loading {bundle}", 1)
        from ..runtime.address_space import require_address_space

        require_address_space(_IMPORTS, "running a model")
        from ..runtime.loading import load

        model = load(bundle, device=device, threads=threads, check=check)
    tell_device(device, model.device)
    return model


def tell_device(wanted: DeviceName, taken: Device) -> None:
    """Whoever left the choice to us hears what was chosen, and why."""
    if wanted == "auto":
        say(f"device: {taken.kind} ({taken.reason})")

"""module → ONNX graphs → verified bundle."""

from ..runtime.address_space import require_address_space

# Of address space, to import PyTorch and trace a small model. PyTorch aborts the process where it cannot have it.
require_address_space(768 << 20, "exporting")

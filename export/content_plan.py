"""The weights of models that are traced whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch
from torch import Tensor

from .builder import Builder
from .lower_basic import COLUMNS, dims
from .recipe import Matrix
from .stitch import WeightPlan
from .trace import Fragment

INLINE = 1024  # constants of more elements than this go into the weights file


class ContentPlan(WeightPlan):
    """Weights by content: tied ones come under either name, and constants have none."""

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__(dtype, {})
        self._names: dict[str, str] = {}  # content → name in the file
        self.tensors: dict[str, Tensor] = {}

    def adopt(self, fragment: Fragment) -> Fragment:
        constants, weights = [], {}
        for value in [*fragment.weights, *fragment.constants]:
            assert value.const_value is not None
            array = value.const_value.numpy()
            if value not in fragment.weights and array.size <= INLINE:
                constants.append(value)
                continue
            digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
            name = self._names.setdefault(digest, fragment.weights.get(value, f"constant.{len(self._names)}"))
            self.tensors[name] = torch.from_numpy(array.copy())
            weights[value] = name
        adopted = replace(fragment, constants=constants, weights=weights)
        self.see(adopted, "")
        return adopted

    def use(self, builder: Builder, name: str, shape: Sequence[int]) -> ir.Value:  # noqa: ARG002 - the tensor is known
        tensor = self.tensors[name]
        dtype = ir.DataType.from_numpy(tensor.numpy().dtype)
        return builder.weight(name, dtype, self.stored_shape(name, tensor.shape))

    def matrices(self) -> dict[str, Matrix]:
        """What linear layers and embeddings of tokens read, and nothing else does."""
        return {
            name: Matrix(tuple(tensor.shape))
            for name, tensor in self.tensors.items()
            if name in self.can_quantise and tensor.is_floating_point()
        }

    def own_matrices(
        self, is_linear: Callable[[str], bool], vocab_sizes: Collection[int | None]
    ) -> dict[str, Matrix]:
        """Of a module that is not ours: its linear layers', and the table of its tokens; no other table (of positions, say).

        `is_linear`: PyTorch is seen to multiply by it, so that the gate can round what goes in as the graphs do.
        """
        return {
            name: matrix
            for name, matrix in self.matrices().items()
            if is_linear(name) or (name not in self._columns and matrix.shape[0] in vocab_sizes)
        }

    def reader(self, value: ir.Value) -> Callable[[], Tensor]:
        name = str(value.name)
        if name == COLUMNS:
            [length] = dims(value)
            return lambda: torch.arange(length)
        tensor = self.tensors[name]
        return lambda: tensor.T if self.layout(name) == "columns" else tensor

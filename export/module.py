"""A user's own module: `tfmx export path/to/file.py:factory`.

The file is run (it is the user's program), the factory called without arguments, and what it returns traced
whole, twice: with any number of tokens, and with one. The protocol is in tfm_model/protocol.py.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from .. import InputError, TfmxError
from ..runtime.bundle import FileInfo, file_info
from ..tfm_model.checkpoint import GenerationDefaults
from ..tfm_model.protocol import ExportableModule
from ..tfm_model.state import StateSpec
from .builder import Builder
from .lower_ort import OrtModuleLowering
from .lower_portable import COLUMNS, FLOAT, PortableLowering
from .progress import Progress
from .reference import ModuleReference, Reference
from .source import KINDS, Graphs, SourceKind, stored_tensors
from .stitch import (
    GraphKind,
    Target,
    Weight,
    WeightPlan,
    dims,
    graph_inputs,
    keep_input,
    present_shape,
    stamp,
)
from .trace import TRACE_OPSET, Fragment, cut, trace
from .weights import torch_dtype

INLINE = 1024  # constants of more elements than this go into the weights file


class ModuleError(InputError):
    """The user's file or module does not follow the protocol."""


class TraceError(TfmxError):
    """torch.export or its ONNX translation could not follow the user's module."""


class ModuleSource:
    kind: SourceKind = "python"

    def __init__(self, source: str, dtype: ir.DataType, max_context: int | None) -> None:
        file, _, self._factory_name = source.rpartition(":")
        self._file = Path(file)
        self._dtype = dtype
        self._built = module = self._build()
        self.spec = _checked_spec(module, source)
        self.vocab_size, self.max_context = module.vocab_size, module.max_context
        if max_context is not None and max_context != self.max_context:
            raise ModuleError(
                f"--max-context is {max_context}; a module of your own says its max_context itself"
            )
        self.model_info: dict[str, object] = {"factory": self._factory_name, "class": type(module).__name__}
        self.generation = GenerationDefaults(eos_token_ids=tuple(getattr(module, "eos_token_ids", ())))
        self.texts: dict[str, str] = {}
        tokenizer = getattr(module, "tokenizer_json", None)
        if tokenizer is not None:
            self.texts["tokenizer.json"] = str(tokenizer)

    def digests(self) -> dict[str, FileInfo]:
        return {self._file.name: file_info(self._file)}

    def growth(self, target: Target) -> str:  # noqa: ARG002 - the same for both
        return "append"

    def reference(self) -> Reference:
        return ModuleReference(self._module, torch_dtype(self._dtype))

    def _module(self) -> ExportableModule:
        return copy.deepcopy(self._built)  # conversions are done in place

    def _build(self) -> ExportableModule:
        torch.manual_seed(0)  # a factory that draws its weights gives the same ones each time
        with _import_path(self._file.resolve().parent):
            factory = _load_factory(self._file, self._factory_name)
            try:
                module: Any = factory()
            except Exception as error:
                what = f"{self._factory_name} in {self._file}"
                raise ModuleError(f"{what} failed: {_first_line(error)}") from error
        for name in ("vocab_size", "max_context", "state_spec"):
            if not hasattr(module, name):
                raise ModuleError(
                    f"{type(module).__name__} from {self._file} has no {name}; see tfmx.tfm_model.protocol"
                )
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_complex():
                raise ModuleError(
                    f"{name} is complex, which ONNX has no ops for; keep cos and sin as two real buffers"
                )
        checked: ExportableModule = module
        return checked

    def graphs(self, target: Target, opset: int, progress: Progress) -> Graphs:
        if opset < TRACE_OPSET:
            raise ModuleError(f"--opset is {opset}; a module of your own is traced at {TRACE_OPSET} or above")
        progress.stage("tracing", len(KINDS))
        module = self._module().to(torch_dtype(self._dtype)).eval()
        plan = _ModulePlan(self._dtype)
        fragments: dict[GraphKind, Fragment] = {}
        for kind in KINDS:
            traced = _trace_module(module, kind, self.spec, torch_dtype(self._dtype), opset)
            fragments[kind] = plan.adopt(traced)
            progress.advance()
        models = {kind: self._stitch(kind, fragments[kind], target, opset, plan) for kind in KINDS}
        return Graphs(models, stored_tensors(models.values(), plan.reader))

    def _stitch(
        self, kind: GraphKind, fragment: Fragment, target: Target, opset: int, plan: _ModulePlan
    ) -> ir.Model:
        builder = Builder(kind, opset)
        inputs = graph_inputs(builder, kind, with_positions=True)
        pasts = [builder.input(state.past, self._dtype, state.shape) for state in self.spec]
        keep = keep_input(builder) if kind == "prefill" else None
        lowering_kind = PortableLowering if target == "portable" else OrtModuleLowering
        lowering = lowering_kind(builder, inputs, self._dtype, self.max_context, is_decode=kind == "decode")
        assert inputs.position_ids is not None
        given = [inputs.input_ids, inputs.attention_mask, inputs.position_ids, *pasts]
        logits, *presents = stamp(fragment, given, "", lowering, plan)
        if self._dtype != FLOAT:
            logits = builder.op("Cast", logits, to=FLOAT)
        if keep is not None:
            logits = PortableLowering.select(lowering, logits, keep)
        length: int | str = "logits_length" if kind == "prefill" else 1
        builder.output(logits, "logits", FLOAT, ["batch_size", length, self.vocab_size])
        for state, present in zip(self.spec, presents, strict=True):
            builder.output(present, state.present, self._dtype, present_shape(state.shape, "append"))
        return builder.model()


class _ModulePlan(WeightPlan):
    """Weights by content: the two traces name them differently, and tied ones come under either name."""

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__(dtype, {})
        self._names: dict[str, str] = {}  # content → name in the file
        self._tensors: dict[str, Tensor] = {}

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
            self._tensors[name] = torch.from_numpy(array.copy())
            weights[value] = name
        adopted = replace(fragment, constants=constants, weights=weights)
        self.see(adopted, "")
        return adopted

    def use(self, builder: Builder, name: str, shape: object) -> ir.Value:  # noqa: ARG002 - the tensor is known
        tensor = self._tensors[name]
        stored = tuple(reversed(tensor.shape)) if self.is_column(name) else tuple(tensor.shape)
        dtype = ir.DataType.from_numpy(tensor.numpy().dtype)
        self.weights[name] = Weight(name, dtype, stored, self.is_column(name))
        return builder.weight(name, dtype, stored)

    def reader(self, value: ir.Value) -> Callable[[], Tensor]:
        name = str(value.name)
        if name == COLUMNS:
            [length] = dims(value)
            return lambda: torch.arange(length)
        tensor = self._tensors[name]
        return lambda: tensor.T if self.is_column(name) else tensor


def _load_factory(file: Path, name: str) -> Callable[[], object]:
    if not file.is_file():
        raise ModuleError(f"{file} is not a file; wanted path/to/file.py:factory")
    module = _run_file(file.resolve())
    factory = getattr(module, name, None)
    if not callable(factory):
        found = ", ".join(
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        )
        raise ModuleError(f"{file} has no function {name!r}; it has {found or 'none'}")
    return factory  # type: ignore[no-any-return]


@contextlib.contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    """The file may import what lies beside it, as it could when run."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _run_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tfmx_source_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModuleError(f"running {file} failed: {_first_line(error)}") from error
    return module


def _checked_spec(module: ExportableModule, source: str) -> StateSpec:
    spec = module.state_spec()
    for state in spec:
        grows = "past_sequence_length" in state.shape
        unknown = [dim for dim in state.shape if isinstance(dim, str)]
        unknown = [dim for dim in unknown if dim not in {"batch_size", "past_sequence_length"}]
        if unknown:
            raise ModuleError(
                f"{source}: state {state.past} has the dimension {unknown[0]!r}; "
                "only batch_size and past_sequence_length may be left open"
            )
        if (
            state.shape[:1] != ("batch_size",)
            or state.growth == "capacity"
            or grows != (state.growth == "append")
        ):
            raise ModuleError(
                f"{source}: state {state.past} has shape {state.shape} and growth {state.growth!r}; wanted "
                "batch_size first, and past_sequence_length in it just if the growth is 'append'"
            )
    return spec


def _trace_module(
    module: ExportableModule, kind: GraphKind, spec: StateSpec, dtype: torch.dtype, opset: int
) -> Fragment:
    B, P, T = 2, 3, 5 if kind == "prefill" else 1
    sizes = {"batch_size": B, "past_sequence_length": P}
    shapes = [[sizes[dim] if isinstance(dim, str) else dim for dim in state.shape] for state in spec]
    states = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    ids = torch.zeros(B, T, dtype=torch.int64)
    row = (0, 1) if kind == "prefill" else (0,)
    axes = [
        row,
        (0, 1),
        row,
        *[[i for i, d in enumerate(state.shape) if isinstance(d, str)] for state in spec],
    ]

    def run(input_ids: Tensor, mask: Tensor, positions: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        logits, present = module(input_ids, mask, positions, list(state))
        return (logits, *present)

    assert isinstance(module, nn.Module)
    mask = torch.ones(B, P + T, dtype=torch.int64)
    positions = torch.arange(P, P + T).expand(B, T).contiguous()
    try:
        graph = trace(module, run, [ids, mask, positions, *states], axes, opset)
    except Exception as error:
        raise TraceError(f"torch could not trace the module's {kind}: {_first_line(error)}") from error
    if len(graph.outputs) != 1 + len(spec):
        raise ModuleError(
            f"the module's forward returns {len(graph.outputs) - 1} state tensors, its state_spec has {len(spec)}"
        )
    fragment = cut(graph.inputs, graph.outputs)
    _check_attention(fragment)
    return fragment


def _check_attention(fragment: Fragment) -> None:
    """Targets derive masks and positions from the graph's inputs, so a module's own would be lost."""
    for node in fragment.nodes:
        if (node.domain, node.op_type) == ("tfmx", "Attention"):
            for index, name in ((1, "attention_mask"), (2, "position_ids")):
                if node.inputs[index + 2] is not fragment.inputs[index]:
                    raise ModuleError(
                        f"ops.attention must be given forward's own {name}, not one computed from it"
                    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

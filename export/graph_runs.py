"""The exported graphs' side of the gate: a case's runs in onnxruntime, each starting from the state of the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..runtime.devices import fastest_attention, import_onnxruntime
from ..tfm_model.state import StateTensor
from .cases import Case, Run
from .parity_error import ParityError
from .reference import Array, CaseOutputs, Pasts, Reference, by_element, encoded_elements, real
from .rounded import INT8_TOP
from .signature import Signature
from .stitch import GRAPHS_OF_KIND, GraphKind


class Graphs:
    """The graphs of a folder, run on given states; `growth` says how they lay out theirs."""

    def __init__(
        self,
        folder: Path,
        growth: str,
        signature: Signature,
        precision: torch.dtype,
        models: Mapping[GraphKind, bytes] | None = None,  # instead of those that lie in the folder
        cache_scales: Sequence[Array] | None = None,  # of each state, where the cache is of int8
    ) -> None:
        self.growth, self.signature, self._cache_scales = growth, signature, cache_scales
        self.dtype = torch.zeros(0, dtype=precision).numpy().dtype  # of vectors, images and the state
        options = import_onnxruntime().SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # beside PyTorch's own threads
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder.absolute())
        )
        if models is not None:  # packed, MatMulNBits sums in a way of its own, twice as far off as PyTorch's
            options.add_session_config_entry("session.disable_prepacking", "1")
        with fastest_attention(int8_cache=cache_scales is not None):  # as the runtime does
            self.sessions = {
                kind: _open(
                    (folder / f"{kind}.onnx").read_bytes() if models is None else models[kind], kind, options
                )
                for kind in GRAPHS_OF_KIND[signature.kind]
            }

    def run(self, reference: Reference, pasts: Pasts, case: Case) -> CaseOutputs:
        result = CaseOutputs()
        moving = [state for state in reference.spec if state.growth != "fixed"]
        columns = case.runs[-1].attention_mask
        state = [pasts.state(i, case).contiguous().numpy() for i in range(len(moving))]
        if self.growth == "capacity":
            assert columns is not None
            state = [packed(v, case, columns.shape[1] + case.spare if case.spare else 0) for v in state]
        if self._cache_scales is not None:
            state = [to_int8(v, scales) for v, scales in zip(state, self._cache_scales, strict=True)]
        fixed: dict[str, Array] = {}
        for run in case.runs:
            pasts_by_name = {spec.past: values for spec, values in zip(moving, state, strict=True)}
            main, rest = self._call(run, pasts_by_name | fixed)
            if run.graph == "encode":
                known = [spec for spec in reference.spec if spec.growth == "fixed"]
                fixed = {spec.past: rest[spec.present] for spec in known}
                fixed["encoder_attention_mask"] = run.attention_mask  # type: ignore[assignment]
                extra = [encoded_elements(rest[spec.present], spec, run) for spec in known]
                names = self.signature.encoder_map_names
            else:
                state = [rest[spec.present] for spec in moving]
                extra = [
                    self._written(v, spec, run) for v, spec in zip(self._wide(state), moving, strict=True)
                ]
                names = self.signature.map_names
            if self._is_source(run):
                extra.insert(0, real(main, run))
            else:
                result.main.append(main)
            result.states.append(extra + [by_element(rest[name], run) for name in names])
        return result

    def _wide(self, state: list[Array]) -> list[Array]:
        """As numbers, also where the cache is of int8."""
        if self._cache_scales is None:
            return state
        return [from_int8(values, scales) for values, scales in zip(state, self._cache_scales, strict=True)]

    def _call(self, run: Run, state: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """The main output, and all by name."""
        session = self.sessions[run.graph]
        elements = self.signature.inputs if run.graph == "encode" else self.signature.steps
        inputs = run.inputs if elements.kind == "tokens" else run.inputs.astype(self.dtype)
        given = {
            elements.name: inputs,
            "attention_mask": self._mask(session, run),
            "position_ids": run.position_ids,
            "num_logits_to_keep": np.array(run.keep),
            **state,
        }
        wanted = {value.name for value in session.get_inputs()}
        if run.keep and not self.signature.outputs.only_last:
            wanted.add("num_logits_to_keep")  # has a default, so it is not among the inputs that must be fed
        names = [value.name for value in session.get_outputs()]
        try:
            outputs = session.run(None, {name: value for name, value in given.items() if name in wanted})
        except Exception as error:  # onnxruntime's errors have no class in common but this
            raise ParityError(
                f"onnxruntime cannot run the {run.graph} graph: {str(error).splitlines()[0]}"
            ) from error
        found = dict(zip(names, outputs, strict=True))
        main = found["last_hidden_state" if self._is_source(run) else self.signature.outputs.name]
        expected = self._main_shape(run)
        if main.shape != expected:
            raise ParityError(
                f"the {run.graph} graph gives a main output of shape {main.shape}, wanted {expected}"
            )
        return main, found

    def _mask(self, session: Any, run: Run) -> Array | None:
        """A graph whose mask is declared as long as its input takes the new columns only."""
        shapes = {value.name: value.shape for value in session.get_inputs()}
        main = shapes[(self.signature.inputs if run.graph == "encode" else self.signature.steps).name]
        new_only = run.attention_mask is not None and shapes.get("attention_mask", [0, 0])[1] == main[1]
        return run.attention_mask[:, -run.length :] if new_only else run.attention_mask  # type: ignore[index]

    def _is_source(self, run: Run) -> bool:
        return run.graph == "encode" and self.signature.kind == "encoder-decoder"

    def _main_shape(self, run: Run) -> tuple[int | None, ...]:
        answer, B = self.signature.outputs, len(run.inputs)
        is_image = run.graph == "encode" and self.signature.inputs.kind == "images"
        T = self.signature.inputs.length if is_image else run.length
        if self._is_source(run):
            return B, T, self.signature.encoded_width
        if answer.pooled:
            return B, answer.size
        return B, 1 if answer.only_last else run.keep or T, answer.size

    def _written(self, present: Array, state: StateTensor, run: Run) -> Array:
        if "past_sequence_length" not in state.shape:
            return present
        is_real, T = run.is_real, run.length
        rows = np.moveaxis(present, state.shape.index("past_sequence_length"), 1)  # (B, S, ...)
        if self.growth == "append":
            return rows[:, rows.shape[1] - T :][is_real]
        assert run.attention_mask is not None
        n_past = run.attention_mask[:, :-T].sum(axis=1)
        return np.concatenate(
            [
                row[start : start + count]
                for row, start, count in zip(rows, n_past, is_real.sum(1), strict=True)
            ]
        )


def _open(model: bytes, kind: GraphKind, options: Any) -> Any:
    try:
        return import_onnxruntime().InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no class in common but this
        raise ParityError(f"onnxruntime cannot load {kind}.onnx: {str(error).splitlines()[0]}") from error


def to_int8(values: Array, scales: Array) -> Array:
    steps = np.round(values.astype(np.float64) / scales.astype(np.float64))
    return steps.clip(-INT8_TOP - 1, INT8_TOP).astype(np.int8)


def from_int8(values: Array, scales: Array) -> Array:
    return values.astype(np.float32) * scales.astype(np.float32)


def packed(values: Array, case: Case, capacity: int) -> Array:
    """Columns → slots: the real ones of each row first, garbage in the room behind them."""
    B, H, P, D = values.shape
    slots = np.full((B, H, max(capacity, P), D), 1e3, dtype=values.dtype)
    for row, mask in enumerate(case.past_mask):
        slots[row, :, : int(mask.sum())] = values[row][:, mask == 1]
    return slots

"""Every architecture that the config can describe passes the gate, on both targets, at every opset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from random_models import PLAIN, VARIANTS, random_source

from tfmx.export.options import ExportOptions
from tfmx.export.parity import Parity, ParityError
from tfmx.export.pipeline import export_model
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.ops import OPSETS
from tfmx.tfm_model.checkpoint import LazyTensor

TARGETS = ("ort", "portable")


def export(name: str, out: Path, target: str, dtype: str = "fp32", opset: int = 18) -> Parity:
    kind = ir.DataType.FLOAT if dtype == "fp32" else ir.DataType.FLOAT16
    options = ExportOptions(target=target, dtype=dtype, opset=opset)
    parity = export_model(random_source(VARIANTS[name], kind), out, options)
    assert parity is not None
    return parity


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_variant_passes_the_gate(name: str, target: str, tmp_path: Path) -> None:
    parity = export(name, tmp_path / "bundle", target)
    assert parity.passed
    assert len(parity.cases) >= 8
    assert Bundle.open(tmp_path / "bundle").manifest.parity == parity.certificate()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("opset", OPSETS[""])
def test_every_opset_passes_the_gate(target: str, opset: int, tmp_path: Path) -> None:
    assert export("windows", tmp_path / "bundle", target, opset=opset).passed
    for graph in ("prefill", "decode"):
        path = tmp_path / "bundle" / f"{graph}.onnx"
        model = onnx.load(path, load_external_data=False)
        assert {o.version for o in model.opset_import if o.domain == ""} == {opset}
        if target == "portable":
            onnx.checker.check_model(path, full_check=True)
            assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["plain", "biases and query/key norm", "layer norm without bias, geglu", "soft-caps and scales"]
)
def test_half_precision_passes_the_gate(name: str, target: str, tmp_path: Path) -> None:
    assert export(name, tmp_path / "bundle", target, dtype="fp16").passed
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert {state.dtype for state in manifest.state} == {"float16"}


@pytest.mark.parametrize("target", TARGETS)
def test_tied_weights_are_stored_once_and_shared_by_both_graphs(target: str, tmp_path: Path) -> None:
    export("plain", tmp_path / "bundle", target)
    size = (tmp_path / "bundle" / "weights.bin").stat().st_size
    parameters = sum(int(np.prod(t.shape)) for t in random_source(PLAIN)._checkpoint.tensors.values())
    pages = 64 * 4096  # rounding each tensor up to a page
    assert 4 * parameters <= size < 4 * parameters + pages
    names = []
    for graph in ("prefill", "decode"):
        model = onnx.load(tmp_path / "bundle" / f"{graph}.onnx", load_external_data=False)
        names.append({i.name for i in model.graph.initializer if i.external_data})
    assert names[1] <= names[0]


def test_graphs_carry_no_trace_of_the_machine(tmp_path: Path) -> None:
    export("plain", tmp_path / "bundle", "portable")
    for path in (tmp_path / "bundle").iterdir():
        content = path.read_bytes()
        assert str(tmp_path).encode() not in content, path.name
        assert b"site-packages" not in content, path.name


@pytest.mark.parametrize("context", [2, 3, 8, 13])
def test_a_context_shorter_than_the_cases_is_checked_all_the_same(context: int, tmp_path: Path) -> None:
    source = random_source(replace(PLAIN, context=context))
    for target in TARGETS:
        parity = export_model(source, tmp_path / target, ExportOptions(target=target))
        assert parity is not None
        assert parity.passed


def test_values_that_overflow_in_half_precision_fail_the_gate(tmp_path: Path) -> None:
    source = random_source(PLAIN, ir.DataType.FLOAT16)
    huge = LazyTensor("norm.weight", (PLAIN.width,), lambda: torch.full((PLAIN.width,), 60000.0))
    source._checkpoint.tensors["norm.weight"] = huge
    with pytest.raises(ParityError, match="PyTorch itself gives values that are not finite in float16"):
        export_model(source, tmp_path / "bundle", ExportOptions(dtype="fp16"))
    assert not (tmp_path / "bundle").exists()

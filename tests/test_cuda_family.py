"""Every operator of every preset's graphs has a CUDA kernel for its types, by onnxruntime's own table."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from cuda_coverage import missing_cuda_kernels

from tfmx.export.options import DTYPES
from tfmx.export.progress import Silent
from tfmx.export.source import open_source
from tfmx.export.weights import link_weights
from tfmx.tfm_model.presets import PRESETS

SMALL = [name for name in PRESETS if name != "vaswani-base"]
HALF = ("encoder-decoder", "random-features", "ablated-lstm", "lstm", "class-token", "relative", "embedding")


def graphs(name: str, dtype: str, target: str) -> dict[str, onnx.ModelProto]:
    made = open_source(f"preset:{name}", DTYPES[dtype], None).graphs(target, 18, Silent())
    link_weights(made.models.values(), made.tensors)
    return {kind: ir.to_proto(model) for kind, model in made.models.items()}


@pytest.mark.parametrize("name", SMALL)
def test_a_preset_has_cuda_kernels(name: str) -> None:
    for kind, model in graphs(name, "fp32", "portable").items():
        assert missing_cuda_kernels(model) == [], kind


@pytest.mark.parametrize("name", HALF)
def test_a_preset_in_half_precision_has_cuda_kernels(name: str) -> None:
    for target in ("portable", "ort"):
        for kind, model in graphs(name, "fp16", target).items():
            assert missing_cuda_kernels(model) == [], kind

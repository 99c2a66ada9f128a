"""What an export is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from ..runtime.ops import check_opset
from .arithmetic import CacheNumbers
from .layout import Target
from .recipe import Quant

Precision = Literal["fp32", "fp16"]
DTYPES: dict[Precision, ir.DataType] = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}
DEFAULT_OPSET = 18  # runs in every runtime that was tried, with 17


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    target: Target = "ort"
    dtype: Precision = "fp32"
    opset: int = DEFAULT_OPSET
    max_context: int | None = None  # None: the model's own
    verify: bool = True
    attentions: tuple[int, ...] | Literal["all"] = ()  # layers whose weights the graphs also give
    quant: Quant | None = None
    kv: CacheNumbers = "float"

    def __post_init__(self) -> None:
        check_opset(self.opset)

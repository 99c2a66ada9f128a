"""The config.json that `save_model` writes, read without PyTorch."""

from __future__ import annotations

from typing import TypeVar

from ..strict_json import SchemaError, decode
from .checks import ConfigError
from .config import ModelConfig
from .values import Values

MODEL_TYPE = "tfmx"
T = TypeVar("T")


def is_tfmx_config(raw: Values) -> bool:
    return raw.get("model_type") == MODEL_TYPE


def parse_tfmx_config(raw: Values) -> ModelConfig:
    return decoded(ModelConfig, {key: value for key, value in raw.items() if key != "model_type"})


def decoded(kind: type[T], data: object) -> T:
    try:
        return decode(kind, data)
    except SchemaError as error:
        raise ConfigError(str(error)) from error

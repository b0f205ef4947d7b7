"""What a tool returned, as the model gets it: made plain at the border, or refused by name."""

from __future__ import annotations

import base64
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from greenroom.runtime.calls import ToolOutput
from greenroom.runtime.messages import clean, cleaned


class NotPlain(TypeError):
    """A tool returned something that has no JSON form; the tool did run."""


def to_output(value: Any) -> ToolOutput:
    """str as it is, ToolOutput as it is, anything else as JSON; raises NotPlain."""
    if isinstance(value, ToolOutput):
        return storable_output(value)
    if isinstance(value, str):
        return ToolOutput.of_text(clean(value))
    return ToolOutput.of_text(plain_json(value))


def storable_output(output: ToolOutput) -> ToolOutput:
    """The output without lone surrogates: no store takes them."""
    try:
        _ = output.model_dump_json()
    except PydanticSerializationError:
        return ToolOutput.model_validate(cleaned(output.model_dump()))
    return output


def plain_json(value: Any) -> str:
    """Compact JSON; dates, sets, decimals and models made plain, bytes as text or base64, NaN as null."""
    try:
        return to_json(value, inf_nan_mode="null", bytes_mode="base64", fallback=_fallback).decode()
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise NotPlain(f"the result cannot be written as JSON: {error}") from None


def _fallback(value: Any) -> Any:
    if isinstance(value, memoryview | bytearray):
        return base64.b64encode(bytes(value)).decode()
    raise TypeError(f"a {type(value).__name__} has no JSON form")

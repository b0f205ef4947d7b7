"""Model providers, and the `provider:model` strings that name them."""

from __future__ import annotations

from greenroom.runtime.errors import ConfigError
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.providers.openai import OpenAICompatible
from greenroom.runtime.providers.scripted import Scripted, load_script

__all__ = ["OpenAICompatible", "Scripted", "provider_from_string"]


def provider_from_string(text: str, folder: str = ".") -> LlmProvider:
    """`openai:MODEL` or `scripted:FILE.yaml` (relative to `folder`); raises ConfigError."""
    kind, separator, name = text.partition(":")
    if not separator or not name:
        raise ConfigError(f"{text!r} names no model", hint="Write PROVIDER:MODEL, as in openai:gpt-5")
    if kind == "openai":
        return OpenAICompatible(model=name)
    if kind == "scripted":
        return load_script(name, folder)
    raise ConfigError(f"there is no provider {kind!r}", hint="Known providers: openai, scripted")

"""Model providers, and the `provider:model` strings that name them."""

from __future__ import annotations

import os

from greenroom.runtime.errors import ConfigError
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.providers.anthropic import Anthropic
from greenroom.runtime.providers.openai import OpenAICompatible
from greenroom.runtime.providers.presets import preset
from greenroom.runtime.providers.scripted import Scripted, load_script

__all__ = ["Anthropic", "OpenAICompatible", "Scripted", "provider_from_string"]


def provider_from_string(text: str, folder: str = ".") -> LlmProvider:
    """`PRESET:MODEL` (see presets.py) or `scripted:FILE.yaml` (relative to `folder`); raises ConfigError."""
    kind, separator, name = text.partition(":")
    if not separator or not name:
        raise ConfigError(f"{text!r} names no model", hint="Write PROVIDER:MODEL, as in openai:gpt-5")
    if kind == "scripted":
        return load_script(name, folder)
    return preset(kind, name, dict(os.environ))

"""Presets: where known endpoints are, which variable holds their key, what is different about them. A table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from greenroom.runtime.errors import ConfigError
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.providers.anthropic import Anthropic
from greenroom.runtime.providers.openai import OpenAICompatible


@dataclass(frozen=True, slots=True)
class Preset:
    """base_url None: the dialect's own variables and default; "" must be given by the environment variable base_env.

    quirks: further arguments of the provider.
    """

    dialect: Literal["openai", "anthropic"]
    base_url: str | None
    api_key_env: str
    base_env: str | None = None
    quirks: dict[str, Any] = field(default_factory=dict)


KEYED = {"needs_key": True}

PRESETS: dict[str, Preset] = {
    "openai": Preset("openai", None, "OPENAI_API_KEY"),
    "anthropic": Preset("anthropic", None, "ANTHROPIC_API_KEY"),
    "deepseek": Preset("openai", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", quirks=KEYED),
    "qwen": Preset(
        "openai", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY", quirks=KEYED
    ),
    "moonshot": Preset("openai", "https://api.moonshot.ai/v1", "MOONSHOT_API_KEY", quirks=KEYED),
    "gemini": Preset(
        "openai",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        quirks={**KEYED, "reasoning": False},
    ),
    "vllm": Preset("openai", "http://127.0.0.1:8000/v1", "VLLM_API_KEY", "VLLM_BASE_URL"),
    "ollama": Preset("openai", "http://127.0.0.1:11434/v1", "OLLAMA_API_KEY", "OLLAMA_BASE_URL"),
    "llamacpp": Preset("openai", "http://127.0.0.1:8080/v1", "LLAMACPP_API_KEY", "LLAMACPP_BASE_URL"),
    "azure": Preset(
        "openai",
        "",
        "AZURE_OPENAI_API_KEY",
        "AZURE_OPENAI_BASE_URL",
        quirks={**KEYED, "key_header": "api-key", "reasoning": False},
    ),
}


def preset(name: str, model: str, environment: dict[str, str]) -> LlmProvider:
    """The provider of a preset; raises ConfigError for an unknown one, or one whose address is not set."""
    found = PRESETS.get(name)
    if found is None:
        raise ConfigError(
            f"there is no provider {name!r}", hint=f"Known providers: {', '.join(sorted(PRESETS))}, scripted"
        )
    named = environment.get(found.base_env) if found.base_env else None
    base_url = named or found.base_url
    if base_url == "":
        raise ConfigError(
            f"the provider {name!r} has no address",
            hint=f"Set {found.base_env}, as in https://NAME.openai.azure.com/openai/v1",
        )
    if found.dialect == "anthropic":
        return Anthropic(model, base_url, found.api_key_env, **found.quirks)
    return OpenAICompatible(model, base_url, found.api_key_env, **found.quirks)

"""The agent that a command's options, its environment and its settings file name."""

from __future__ import annotations

import dataclasses
import os

from greenroom.runtime.config import AgentConfig, load_attribute
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.providers import provider_from_string
from greenroom.runtime.providers.optional import preflight
from greenroom.runtime.tools.builtin import default_tools
from greenroom.settings import Settings

DEFAULT_SANDBOX = "bubblewrap"


def agent_for(settings: Settings) -> AgentConfig | None:
    """The agent that is named, or the default tools with the model that is named; None when neither is."""
    kind = settings.sandbox
    if settings.agent is not None:
        config = _load(settings.agent)
        if settings.model is not None:
            config = dataclasses.replace(config, provider=provider_from_string(settings.model))
        if kind is not None:
            config = dataclasses.replace(config, sandbox=kind)
    elif settings.model is not None:
        kind = kind or DEFAULT_SANDBOX
        config = AgentConfig(
            name="agent",
            provider=provider_from_string(settings.model),
            tools=default_tools("host" if kind == "host" else "sandboxed"),
            sandbox=kind,
        )
    else:
        return None
    preflight(config.llm)
    return config


def _load(name: str) -> AgentConfig:
    if ":" not in name or os.path.exists(name):
        return AgentConfig.load(name)
    found = load_attribute(name)
    if not isinstance(found, AgentConfig):
        raise ConfigError(f"{name} is a {type(found).__name__}", hint="Name an AgentConfig")
    return found

"""Settings of the command line: flag over GREENROOM_* environment over greenroom.yaml over default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from greenroom.runtime.errors import ConfigError

FILE = "greenroom.yaml"
KEYS = ("agent", "model", "sandbox", "store")
DEFAULT_STORE = "sqlite:///.greenroom/greenroom.db"


@dataclass(frozen=True, slots=True)
class Settings:
    agent: str | None
    model: str | None
    sandbox: str | None
    store: str


def load_settings(
    *, agent: str | None = None, model: str | None = None, sandbox: str | None = None, store: str | None = None
) -> Settings:
    """The settings with these flags; raises ConfigError for a greenroom.yaml that cannot be read."""
    flags = {"agent": agent, "model": model, "sandbox": sandbox, "store": store}
    file = _from_file(Path(FILE))
    found = {key: flags[key] or os.environ.get(f"GREENROOM_{key.upper()}") or file.get(key) for key in KEYS}
    named = os.environ.get("LLM_MODEL")
    return Settings(
        agent=found["agent"],
        model=found["model"] or (f"openai:{named}" if named else None),
        sandbox=found["sandbox"],
        store=found["store"] or DEFAULT_STORE,
    )


def _from_file(path: Path) -> dict[str, str]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict) or set(document) - set(KEYS):
        raise ConfigError(f"{path} holds something else than settings", hint=f"Settings are: {', '.join(KEYS)}")
    return {key: str(value) for key, value in document.items()}

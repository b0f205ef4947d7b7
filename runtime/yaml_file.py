"""Reading a YAML file that a user wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from greenroom.runtime.errors import ConfigError


def read_yaml(file: Path, what: str) -> Any:
    """Its value; `what`: how a message calls the file. Raises ConfigError naming it."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the {what} {file} cannot be read: {error.strerror}", hint="Give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {what} {file} is not valid YAML: {error}") from None

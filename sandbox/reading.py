"""rooted_read_tool: files below one folder of this machine, and nothing else, for a model to read."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import ToolContext, ToolOutput
from greenroom.runtime.errors import ConfigError, PathRefused
from greenroom.runtime.tools.registry import Tool, ToolSpec
from greenroom.sandbox.paths import RootedFiles

MAX_FILE = 16 * 1024 * 1024
"""Bytes of a file that is read at all."""

MAX_TEXT = 64 * 1024
"""Characters that a model gets at once."""


class RootedReadArguments(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str = Field(description="Path of the file, relative to the folder that may be read")
    offset: int = Field(default=0, ge=0, description="How many characters to leave out at the start")


def rooted_read_tool(root: str | Path) -> Tool:
    """A tool `read_file` for this folder, which is held open; raises ConfigError when there is no such folder."""
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", hint="Name the folder that a model may read")
    files = RootedFiles(folder)

    def read_file(ctx: ToolContext, arguments: RootedReadArguments) -> ToolOutput:
        try:
            data = files.read(arguments.path, MAX_FILE)
        except PathRefused as error:
            return ToolOutput.of_text(str(error), is_error=True)
        except OSError as error:
            return ToolOutput.of_text(f"{arguments.path}: {error.strerror or error}", is_error=True)
        return shown_text(arguments.path, data, arguments.offset)

    description = f"Reads a text file below {folder.name}."
    return Tool(ToolSpec("read_file", description, RootedReadArguments, effect="read_only"), read_file)


def shown_text(path: str, data: bytes, offset: int) -> ToolOutput:
    """A piece of the text from this character on, with how to go on."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ToolOutput.of_text(f"{path} is not UTF-8 text ({len(data)} bytes)", is_error=True)
    piece = text[offset : offset + MAX_TEXT]
    left = len(text) - offset - len(piece)
    return ToolOutput.of_text(f"{piece}\n[{left} more characters: offset {offset + len(piece)}]" if left > 0 else piece)

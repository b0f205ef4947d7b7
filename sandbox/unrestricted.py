"""A tool that reads any file of this machine. Only for a process that is itself shut into a file system of its own.

It is in no default set and no look-up finds it: whoever wants it imports it from here, by this name.
"""

from __future__ import annotations

import os
import stat

from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import ToolContext, ToolOutput
from greenroom.runtime.tools.registry import Tool, ToolSpec
from greenroom.sandbox.reading import MAX_FILE, shown_text


class UnrestrictedReadArguments(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str = Field(description="Path of the file on this machine")
    offset: int = Field(default=0, ge=0, description="How many characters to leave out at the start")


def unrestricted_read_tool() -> Tool:
    """A tool `read_any_file`: whatever this process may read, a model may read with it."""

    def read_any_file(ctx: ToolContext, arguments: UnrestrictedReadArguments) -> ToolOutput:
        try:
            fd = os.open(arguments.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return ToolOutput.of_text(f"{arguments.path} is no regular file", is_error=True)
                data = file.read(MAX_FILE + 1)
        except (OSError, ValueError) as error:
            return ToolOutput.of_text(f"{arguments.path}: {error}", is_error=True)
        if len(data) > MAX_FILE:
            return ToolOutput.of_text(f"{arguments.path} has more than {MAX_FILE} bytes", is_error=True)
        return shown_text(arguments.path, data, arguments.offset)

    spec = ToolSpec(
        "read_any_file", "Reads a text file of this machine.", UnrestrictedReadArguments, effect="read_only"
    )
    return Tool(spec, read_any_file)

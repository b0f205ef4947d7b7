"""The default tools. Each is one sandbox operation, or a question to the user; nothing touches this process's files.

`register_default_tools` does no permission control: an agent gets what its registry holds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import ExecResult, Interrupt, ToolContext, ToolOutput
from greenroom.runtime.errors import ConfigError, PathRefused
from greenroom.runtime.messages import clean
from greenroom.runtime.ports import BoundSandbox
from greenroom.runtime.tools.output import plain_json
from greenroom.runtime.tools.registry import Tool, ToolRegistry, ToolSpec, with_trust


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReadFileArguments(_Arguments):
    path: str = Field(description="Path of the file, relative to the workspace")


class WriteFileArguments(_Arguments):
    path: str = Field(description="Path of the file, relative to the workspace; folders on the way are made")
    content: str = Field(description="The whole new content")
    mode: Literal["write"] = Field(default="write", description="write: replace the file by the content")


class BashArguments(_Arguments):
    command: str = Field(description="A bash command; it runs in the workspace, with no input")


class AskArguments(_Arguments):
    question: str = Field(description="The question to the user")
    options: list[str] = Field(default_factory=list, description="Answers to choose from, if there are any")


async def read_file(ctx: ToolContext, arguments: ReadFileArguments) -> ToolOutput:
    try:
        data = await _sandbox(ctx).read_file(arguments.path)
    except OSError as error:
        return _refused(error)
    try:
        return ToolOutput.of_text(data.decode("utf-8"))
    except UnicodeDecodeError:
        return ToolOutput.of_text(
            f"{arguments.path} is not UTF-8 text ({len(data)} bytes); use bash to look into it", is_error=True
        )


async def write_file(ctx: ToolContext, arguments: WriteFileArguments) -> ToolOutput:
    data = clean(arguments.content).encode()
    try:
        await _sandbox(ctx).write_file(arguments.path, data)
    except OSError as error:
        return _refused(error)
    return ToolOutput.of_text(f"wrote {len(data)} bytes to {arguments.path}")


async def bash(ctx: ToolContext, arguments: BashArguments) -> ToolOutput:
    return exec_output(await _sandbox(ctx).execute(arguments.command))


async def ask_followup_question(_ctx: ToolContext, arguments: AskArguments) -> Interrupt:
    return Interrupt(kind="followup_question", payload=arguments.model_dump(mode="json"))


def exec_output(result: ExecResult) -> ToolOutput:
    """A command's end as JSON. A non-zero exit is a result like any other; a time-out an error with what there was."""
    shown: dict[str, object] = {"status": "completed" if result.status == "exited" else result.status}
    if result.exit_code is not None:
        shown["exit_code"] = result.exit_code
    if result.signal is not None:
        shown["signal"] = result.signal
    shown["output"] = result.output
    if result.dropped_bytes:
        shown["dropped_bytes"] = result.dropped_bytes
    return ToolOutput.of_text(plain_json(shown), is_error=result.status in ("timed_out", "output_limit", "oom"))


def _refused(error: OSError) -> ToolOutput:
    """A file that is not there, not allowed or not readable is the model's to know."""
    text = str(error) if isinstance(error, PathRefused) else f"{error.strerror}: {error.filename}"
    return ToolOutput.of_text(text, is_error=True)


def _sandbox(ctx: ToolContext) -> BoundSandbox:
    assert ctx.sandbox is not None, "the loop runs no sandbox tool without a sandbox"
    return ctx.sandbox


_FILES_AND_SHELL = (
    Tool(
        ToolSpec(
            "read_file",
            "Read a text file of the workspace.",
            ReadFileArguments,
            effect="read_only",
            runs_in="sandbox",
            needs_sandbox=True,
        ),
        read_file,
        builtin="read_file",
    ),
    Tool(
        ToolSpec(
            "write_file",
            "Write a text file of the workspace.",
            WriteFileArguments,
            runs_in="sandbox",
            needs_sandbox=True,
        ),
        write_file,
        builtin="write_file",
    ),
    Tool(
        ToolSpec(
            "bash",
            "Run a bash command in the workspace and get its exit code and output (stdout and stderr together).",
            BashArguments,
            runs_in="sandbox",
            needs_sandbox=True,
        ),
        bash,
        builtin="bash",
    ),
)
_ASK = Tool(
    ToolSpec(
        "askFollowupQuestion",
        "Ask the user a question and wait for the answer. Use it only when you cannot go on without it.",
        AskArguments,
        effect="read_only",
        may_interrupt=True,
    ),
    ask_followup_question,
    builtin="askFollowupQuestion",
)


def default_tools(trust: Literal["sandboxed", "host"]) -> tuple[Tool, ...]:
    """The default tools. "sandboxed" ones refuse a sandbox that enforces no isolation; "host" takes any."""
    if trust not in ("sandboxed", "host"):
        raise ConfigError(f"trust is {trust!r}", hint='Say trust="sandboxed", or trust="host" to allow any sandbox')
    return (*(with_trust(tool, needs_isolation=trust == "sandboxed") for tool in _FILES_AND_SHELL), _ASK)


def register_default_tools(registry: ToolRegistry, trust: Literal["sandboxed", "host"]) -> None:
    """Adds read_file, write_file, bash and askFollowupQuestion. See `default_tools` for `trust`."""
    for tool in default_tools(trust):
        registry.add_tool(tool)

"""The default tools. Each is one sandbox operation, or a question to the user; nothing touches this process's files.

`register_default_tools` does no permission control: an agent gets what its registry holds.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from greenroom.runtime.calls import ExecResult, Interrupt, JobState, ToolContext, ToolOutput
from greenroom.runtime.editing import Edit
from greenroom.runtime.errors import ConfigError, EditRefused, JobNotFound, PathRefused
from greenroom.runtime.jobs import MAX_WAIT
from greenroom.runtime.messages import clean
from greenroom.runtime.ports import BoundSandbox
from greenroom.runtime.tools.output import plain_json
from greenroom.runtime.tools.registry import Tool, ToolRegistry, ToolSpec, with_trust, with_window

YIELD_AFTER = 2.0
"""Seconds until a bash command goes to the background."""


MAX_READ = 64 * 1024
"""Characters of a file that a model gets at once."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReadFileArguments(_Arguments):
    path: str = Field(description="Path of the file, relative to the workspace")
    offset: int = Field(default=1, ge=1, description="The first line to give, counted from 1")
    limit: int | None = Field(default=None, ge=1, description="How many lines to give; as many as fit unless said")


class WriteFileArguments(_Arguments):
    path: str = Field(description="Path of the file, relative to the workspace; folders on the way are made")
    content: str | None = Field(default=None, description="The whole new content (write), or the text to put in")
    mode: Literal["write", "replace", "insert_after", "insert_before", "append"] = Field(
        default="write",
        description="write: replace the file by content; replace: put new_string in place of old_string; insert_after, "
        "insert_before: content as lines of its own after or before the line of old_string; append: content at the end",
    )
    old_string: str | None = Field(
        default=None, description="The text to find, exactly as it stands in the file; it must be there once"
    )
    new_string: str | None = Field(default=None, description="What replace puts there")
    replace_all: bool = Field(default=False, description="Change every place where old_string stands")
    expected_replacements: int | None = Field(
        default=None, ge=1, description="How many places there must be, instead of one"
    )

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        text = self.content if self.mode != "replace" or self.new_string is None else self.new_string
        if text is None:
            raise ValueError(f"mode {self.mode!r} needs {'new_string' if self.mode == 'replace' else 'content'}")
        finds = self.mode in ("replace", "insert_after", "insert_before")
        if finds and not self.old_string:
            raise ValueError(f"mode {self.mode!r} needs old_string, the text to find")
        if not finds and (self.old_string is not None or self.new_string is not None or self.replace_all):
            raise ValueError(
                f"mode {self.mode!r} looks for nothing: say mode='replace' to change what old_string finds"
            )
        if self.replace_all and self.expected_replacements is not None:
            raise ValueError("say replace_all or expected_replacements, not both")
        return self

    @property
    def text(self) -> str:
        return (self.new_string if self.mode == "replace" and self.new_string is not None else self.content) or ""


class BashArguments(_Arguments):
    command: str = Field(description="A bash command, with no input; it begins in the folder where the last one ended")


class CheckArguments(_Arguments):
    id: str = Field(description="The id of the background job, as it was given")
    wait_secs: float | None = Field(
        default=None, ge=0, le=MAX_WAIT, description="Wait up to so many seconds for its end before answering"
    )


class KillArguments(_Arguments):
    id: str = Field(description="The id of the background job, as it was given")


class AskArguments(_Arguments):
    question: str = Field(description="The question to the user")
    options: list[str] = Field(default_factory=list, description="Answers to choose from, if there are any")


async def read_file(ctx: ToolContext, arguments: ReadFileArguments) -> ToolOutput:
    try:
        data = await _sandbox(ctx).read_file(arguments.path)
    except OSError as error:
        return _refused(error)
    try:
        return ToolOutput.of_text(_excerpt(data.decode("utf-8"), arguments.offset, arguments.limit))
    except UnicodeDecodeError:
        return ToolOutput.of_text(
            f"{arguments.path} is not UTF-8 text ({len(data)} bytes); use bash to look into it", is_error=True
        )


def _excerpt(text: str, offset: int, limit: int | None) -> str:
    """The lines asked for, character for character, as far as MAX_READ goes; what is left is told at the end."""
    if offset == 1 and limit is None and len(text) <= MAX_READ:
        return text
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    if offset > max(len(lines), 1):
        return f"[the file has {len(lines)} lines]"
    last = len(lines) if limit is None else min(len(lines), offset - 1 + limit)
    shown, number = "", offset - 1
    while number < last and len(shown) + len(lines[number]) <= MAX_READ:
        shown += lines[number]
        number += 1
    if number == offset - 1 < last:  # one line that is too long by itself
        return f"{lines[number][:MAX_READ]}\n[line {offset} has {len(lines[number])} characters; use bash for the rest]"
    if number == len(lines):
        return shown
    return f"{shown}[line {number} of {len(lines)}; go on with offset {number + 1}]"


async def write_file(ctx: ToolContext, arguments: WriteFileArguments) -> ToolOutput:
    path, text = arguments.path, clean(arguments.text)
    try:
        if arguments.mode == "write":
            await _sandbox(ctx).write_file(path, text.encode())
            return ToolOutput.of_text(f"wrote {len(text.encode())} bytes to {path}")
        count = None if arguments.replace_all else arguments.expected_replacements or 1
        edit = Edit(arguments.mode, text, arguments.old_string or "", count)
        edited = await _sandbox(ctx).edit_file(path, edit)
    except (OSError, EditRefused) as error:
        return _refused(error)
    note = f"; {edited.note}" if edited.note else ""
    return ToolOutput.of_text(f"changed {path} in {edited.places} place{'s' * (edited.places != 1)}{note}")


async def bash(ctx: ToolContext, arguments: BashArguments) -> ToolOutput:
    result = await _sandbox(ctx).start(arguments.command)
    return job_output(result) if isinstance(result, JobState) else exec_output(result)


async def check(ctx: ToolContext, arguments: CheckArguments) -> ToolOutput:
    if ctx.sandbox is None:
        return _no_job(arguments.id)
    try:
        return job_output(await ctx.sandbox.check_job(arguments.id, arguments.wait_secs))
    except JobNotFound as error:
        return ToolOutput.of_text(str(error), is_error=True)


async def kill(ctx: ToolContext, arguments: KillArguments) -> ToolOutput:
    if ctx.sandbox is None:
        return _no_job(arguments.id)
    try:
        return job_output(await ctx.sandbox.kill_job(arguments.id))
    except JobNotFound as error:
        return ToolOutput.of_text(str(error), is_error=True)


def _no_job(id: str) -> ToolOutput:
    return ToolOutput.of_text(f"there is no background job {id!r}", is_error=True)


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


def job_output(job: JobState) -> ToolOutput:
    """A background job as JSON: what it is doing, or how it ended, and what is new of its output."""
    shown: dict[str, object] = {"id": job.id, "status": "completed" if job.status == "exited" else job.status}
    for name in ("exit_code", "signal"):
        if getattr(job, name) is not None:
            shown[name] = getattr(job, name)
    shown["output"] = job.output
    if job.dropped_bytes:
        shown["dropped_bytes"] = job.dropped_bytes
    return ToolOutput.of_text(plain_json(shown))


def _refused(error: OSError | EditRefused) -> ToolOutput:
    """A file that is not there, not allowed, not readable or not as it was thought is the model's to know."""
    if isinstance(error, PathRefused | EditRefused):
        return ToolOutput.of_text(str(error), is_error=True)
    text = f"{error.strerror}: {error.filename}"
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
            "Write a text file of the workspace, or change one in place.",
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
            "Run a bash command in the workspace and get its exit code and output (stdout and stderr together). One "
            f"that takes longer than {YIELD_AFTER:g} s goes on in the background and gives an id for check and kill.",
            BashArguments,
            yield_after=YIELD_AFTER,
            runs_in="sandbox",
            needs_sandbox=True,
        ),
        bash,
        builtin="bash",
    ),
    Tool(
        ToolSpec(
            "check",
            "Look at a background job: what it has put out since the last look, and how it ended if it has.",
            CheckArguments,
            effect="read_only",
            timeout=MAX_WAIT + 30.0,
            runs_in="sandbox",
        ),
        check,
        builtin="check",
    ),
    Tool(
        ToolSpec(
            "kill",
            "End a background job and everything it started.",
            KillArguments,
            effect="idempotent",
            runs_in="sandbox",
        ),
        kill,
        builtin="kill",
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


def default_tools(trust: Literal["sandboxed", "host"], *, yield_after: float | None = YIELD_AFTER) -> tuple[Tool, ...]:
    """The default tools. "sandboxed" ones refuse a sandbox that enforces no isolation; "host" takes any.

    yield_after: seconds until a bash command goes to the background, None for never.
    """
    if trust not in ("sandboxed", "host"):
        raise ConfigError(f"trust is {trust!r}", hint='Say trust="sandboxed", or trust="host" to allow any sandbox')
    made = [with_trust(tool, needs_isolation=trust == "sandboxed") for tool in _FILES_AND_SHELL]
    return (*(with_window(tool, yield_after) if tool.builtin == "bash" else tool for tool in made), _ASK)


@cache
def builtin_tool(name: str, trust: Literal["sandboxed", "host"], yield_after: float | None = YIELD_AFTER) -> Tool:
    """The default tool of this name."""
    return next(tool for tool in default_tools(trust, yield_after=yield_after) if tool.builtin == name)


def register_default_tools(
    registry: ToolRegistry, trust: Literal["sandboxed", "host"], *, yield_after: float | None = YIELD_AFTER
) -> None:
    """Adds read_file, write_file, bash, check, kill and askFollowupQuestion. See `default_tools` for the options."""
    for tool in default_tools(trust, yield_after=yield_after):
        registry.add_tool(tool)

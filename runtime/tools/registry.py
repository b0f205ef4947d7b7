"""ToolRegistry: what a model may be offered. It starts empty; nothing is registered behind anyone's back.

A Tool is a ToolSpec and a function. Calling one validates the arguments, runs the function (a plain `def` in a thread
of its own) and makes a ToolOutput or an Interrupt of what it returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel

from greenroom.runtime.calls import Effect, Interrupt, ToolContext, ToolOutput, ToolSchema
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.tools.output import to_output
from greenroom.runtime.tools.schema import described, json_schema, model_of_signature, validate
from greenroom.runtime.tools.threads import ToolEnded, run_in_thread

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a tool is.

    effect: what a second run would do: read_only (nothing, and it may run beside others), idempotent (the same as
    the first), effectful (something again: it is never repeated). timeout: seconds, None for the agent's
    tool_timeout, 0 for none. yield_after: seconds until it goes on as a background job for `check` and `kill`, None for
    never: with runs_in="sandbox" what ctx.sandbox.start began, else the function itself, which then has no ctx.sandbox.
    may_interrupt: it may return an Interrupt; it then runs first and alone. runs_in: whether everything it does is one
    operation of ctx.sandbox, whose outcome survives this process. needs_sandbox,
    needs_isolation: refused at the start of a run whose sandbox is missing or enforces no isolation.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    effect: Effect = "effectful"
    timeout: float | None = None
    yield_after: float | None = None
    may_interrupt: bool = False
    runs_in: Literal["sandbox", "process"] = "process"
    needs_sandbox: bool = False
    needs_isolation: bool = False

    def __post_init__(self) -> None:
        if self.yield_after is not None and self.yield_after < 0:
            raise ConfigError(f"tool {self.name!r}: yield_after is {self.yield_after}", hint="Give seconds")
        if self.effect not in ("read_only", "idempotent", "effectful"):
            raise ConfigError(
                f"tool {self.name!r}: unknown effect {self.effect!r}", hint="read_only, idempotent or effectful"
            )
        if self.timeout is not None and self.timeout < 0:
            raise ConfigError(f"tool {self.name!r}: timeout is {self.timeout}", hint="Give seconds, 0 for none")


class Unheard:
    """Progress that nobody listens to."""

    def emit_text(self, text: str) -> None:
        """Changes nothing."""


@dataclass(frozen=True)
class Tool:
    """A spec and the function behind it; `calling` tells how the function takes its arguments.

    calling: "fields" (each argument by name, the context under `context` if it asks for one) or "model" (context,
    model). builtin: the name under which `builtin.py` makes this very tool again, None for all others.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    calling: Literal["fields", "model"] = "model"
    context: str | None = None
    builtin: str | None = field(default=None, compare=False)

    @cached_property
    def schema(self) -> ToolSchema:
        return ToolSchema(self.spec.name, self.spec.description, json_schema(self.spec.arguments))

    async def call(self, arguments: dict[str, Any], ctx: ToolContext | None = None) -> ToolOutput:
        """Validates, runs, and answers the output; raises BadArguments, and whatever the function raises."""
        made = await self.invoke(validate(self.spec.arguments, arguments), ctx or _detached_context())
        if isinstance(made, Interrupt):
            raise ConfigError(f"tool {self.spec.name!r} asks someone: it can only be called inside a run")
        return made

    async def invoke(self, arguments: BaseModel, ctx: ToolContext) -> ToolOutput | Interrupt:
        """Runs the function with valid arguments."""
        if self.calling == "fields":
            named = {name: getattr(arguments, name) for name in type(arguments).model_fields}
            if self.context is not None:
                named[self.context] = ctx
            made = await _call(self.function, (), named)
        else:
            made = await _call(self.function, (ctx, arguments), {})
        return made if isinstance(made, Interrupt) else to_output(made)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function, or an object with an async __call__; all else runs in a thread."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _call(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if is_async(function):
        try:
            return await function(*args, **named)
        except (SystemExit, KeyboardInterrupt) as error:  # a tool ends itself, not the process
            raise ToolEnded(f"{type(error).__name__}: {error}") from error
    made = await run_in_thread(lambda: function(*args, **named))
    return await made if inspect.isawaitable(made) else made


def _detached_context() -> ToolContext:
    return ToolContext("", "", CancelToken(), Unheard())


class ToolRegistry:
    """Tools by name, in the order they were added."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.add_tool(tool)

    @overload
    def tool(self, function: F) -> F: ...

    @overload
    def tool(
        self,
        function: None = None,
        *,
        effect: Effect = "effectful",
        timeout: float | None = None,
        yield_after: float | None = None,
        name: str | None = None,
        description: str | None = None,
        may_interrupt: bool = False,
    ) -> Callable[[F], F]: ...

    @overload
    def tool(
        self,
        function: F,
        *,
        effect: Effect = "effectful",
        timeout: float | None = None,
        yield_after: float | None = None,
        name: str | None = None,
        description: str | None = None,
        may_interrupt: bool = False,
    ) -> F: ...

    def tool(
        self,
        function: Callable[..., Any] | None = None,
        *,
        effect: Effect = "effectful",
        timeout: float | None = None,
        yield_after: float | None = None,
        name: str | None = None,
        description: str | None = None,
        may_interrupt: bool = False,
    ) -> Any:
        """Registers a function by its signature and returns it unchanged; with or without parentheses.

        The description is the docstring unless given; what that says of parameters goes to them. Raises ConfigError.
        """

        def register(target: F) -> F:
            arguments, context = model_of_signature(target)
            spec = ToolSpec(
                name=name or target.__name__,
                description=description if description is not None else described(target)[0],
                arguments=arguments,
                effect=effect,
                timeout=timeout,
                yield_after=yield_after,
                may_interrupt=may_interrupt,
            )
            self.add_tool(Tool(spec, target, calling="fields", context=context))
            return target

        return register if function is None else register(function)

    def add(self, spec: ToolSpec, function: Callable[..., Any]) -> None:
        """Registers `function(ctx, arguments)`, `arguments` an instance of the spec's model."""
        self.add_tool(Tool(spec, function))

    def add_tool(self, tool: Tool) -> None:
        """Raises ConfigError when the name is taken."""
        if tool.spec.name in self._tools:
            raise ConfigError(f"there is already a tool {tool.spec.name!r}", hint="Give one of them another name")
        self._tools[tool.spec.name] = tool

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def contains(self, name: str) -> bool:
        return name in self._tools

    def names(self) -> list[str]:
        """Names in the order the tools were added."""
        return list(self._tools)

    def subset(self, names: Iterable[str]) -> ToolRegistry:
        """A registry of these tools alone; raises KeyError naming an unknown one."""
        wanted = list(names)
        for name in wanted:
            if name not in self._tools:
                raise KeyError(f"there is no tool {name!r}; there are: {', '.join(self._tools) or 'none'}")
        return ToolRegistry(self._tools[name] for name in wanted)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())


def with_trust(tool: Tool, *, needs_isolation: bool) -> Tool:
    """The tool, refusing or taking a sandbox that enforces no isolation."""
    return replace(tool, spec=replace(tool.spec, needs_isolation=needs_isolation))


def with_window(tool: Tool, yield_after: float | None) -> Tool:
    """The tool, its commands going to the background after so many seconds, None for never."""
    return replace(tool, spec=replace(tool.spec, yield_after=yield_after))

"""Hooks: an agent's middleware as a run calls it, in order before and in reverse after.

A hook may change what it is given or answer in a tool's place; it decides nothing else. What it raises ends the run as
Fail(middleware). A cancellation always gets past it: a hook that takes no notice is left behind.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from greenroom.runtime.calls import Effect, ModelRequest, ProposedCall, ToolOutput, compact_json
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.history import HistoryError, strict_history
from greenroom.runtime.messages import Delta, Message, MessageDelta, TextDelta, clean
from greenroom.runtime.ports import HookContext, LlmProvider, Middleware
from greenroom.runtime.results import Failure, FailureKind, RunResult
from greenroom.runtime.state import State
from greenroom.runtime.tools.output import to_output

POINTS = ("before_run", "after_run", "before_model", "after_model", "before_tool", "after_tool")
"""The hooks that a run calls; `close` is called by whoever holds the agent."""

CLOSE_TIME = 3.0
"""Seconds that one `close` may take."""

HOOK_GRACE = 5.0
"""Seconds a cancelled hook gets to clean up before the run goes on without it."""

T = TypeVar("T")


class HookFailed(Exception):
    """A hook raised, or gave what cannot be used. `executed`: whether a tool had run, or may have, by then."""

    def __init__(self, name: str, point: str, problem: str, *, executed: bool | None = None) -> None:
        super().__init__(clean(f"middleware {name!r}, {point}: {problem}"))
        self.name, self.point, self.executed = name, point, executed

    @property
    def failure(self) -> Failure:
        return Failure(kind=FailureKind.middleware, message=str(self), retryable=False, tool_executed=self.executed)


@dataclass(frozen=True, slots=True)
class _Hook:
    """One hook of one middleware; `number`: which one that is."""

    number: int
    name: str
    point: str
    function: Callable[..., Coroutine[Any, Any, Any]]

    async def __call__(self, *args: Any) -> Any:
        """What the hook gives. It runs in a task of its own: cancelling the caller ends the wait, whatever it does."""
        task = asyncio.get_running_loop().create_task(self._run(args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and (current is None or not current.cancelling()):
                raise self.failed("it was cancelled from inside") from None
            task.cancel()
            await asyncio.wait([task], timeout=HOOK_GRACE)
            _ = task.done() and (task.cancelled() or task.exception())  # looked at: nobody waits for it any more
            raise

    async def _run(self, args: tuple[Any, ...]) -> Any:
        try:
            return await self.function(*args)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a hook ends its run, not the process
            raise self.failed(f"{type(error).__name__} {_place_of(error)}") from error

    def failed(self, problem: str) -> HookFailed:
        return HookFailed(self.name, self.point, problem, executed=False if self.point == "before_tool" else None)


def _place_of(error: BaseException) -> str:
    """Where it was raised; its text may hold what the hook was to take out."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {Path(last.filename).name}, line {last.lineno}"


class Chain:
    """An agent's middleware; nothing can be added to it.

    holds_text, holds_progress: whether what a model or a tool puts out is held back until the hooks have seen it whole.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = tuple(parts)
        self.hooks = {point: self._hooks(point) for point in POINTS}
        self.holds_text = self._holds("after_model")
        self.holds_progress = self._holds("after_tool")

    def _hooks(self, point: str) -> tuple[_Hook, ...]:
        found = [
            _Hook(number, name_of(part), point, getattr(part, point))
            for number, part in enumerate(self._parts)
            if has_hook(part, point)
        ]
        return tuple(found if point.startswith("before") else reversed(found))

    def _holds(self, point: str) -> bool:
        return any(not getattr(self._parts[hook.number], "live", False) for hook in self.hooks[point])


def checked_middleware(parts: Iterable[Any], agent: str) -> tuple[Any, ...]:
    """The parts as they were given; raises ConfigError for one that has no hook, or one that is none."""
    checked = tuple(parts)
    for part in checked:
        where = f"agent {agent!r}: the middleware {name_of(part)!r}"
        if isinstance(part, type):
            raise ConfigError(f"{where} is a class", hint="Pass an object of it")
        names = [name for name in (*POINTS, "close") if has_hook(part, name)]
        unknown = [name for name in dir(part) if name.startswith(("before_", "after_")) and name not in POINTS]
        if not names or unknown:
            told = f"has the unknown hook {unknown[0]}" if unknown else "has no hook"
            raise ConfigError(f"{where} {told}", hint=f"Hooks are: {', '.join(POINTS)} and close")
        for name in names:
            if not inspect.iscoroutinefunction(getattr(part, name)):
                raise ConfigError(f"{where}: {name} is no async function", hint=f"Write async def {name}(...)")
    return checked


def has_hook(part: Any, name: str) -> bool:
    """Whether the middleware has this hook of its own; the base class's do nothing and are never called."""
    found = getattr(part, name, None)
    return found is not None and getattr(found, "__func__", found) is not getattr(Middleware, name)


def name_of(part: Any) -> str:
    """A middleware's own name, or its class's."""
    name = getattr(part, "name", None)
    name = name() if callable(name) else name
    return str(name or getattr(part, "__name__", None) or type(part).__name__)


async def close_all(parts: Sequence[Any]) -> None:
    """Closes them, the last one first, each whatever became of the others; one that takes too long is left behind."""
    for part in reversed(parts):
        if has_hook(part, "close"):
            closing = asyncio.ensure_future(_Hook(0, name_of(part), "close", part.close)._run(()))
            await asyncio.wait([closing], timeout=CLOSE_TIME)
            if not closing.done():
                closing.cancel()
            _ = closing.done() and (closing.cancelled() or closing.exception())


@dataclass(frozen=True, slots=True)
class Decided:
    """What the hooks made of a call: the final call, what is answered in its place, and which of them did something."""

    call: ProposedCall
    answer: ToolOutput | None = None
    by: tuple[str, ...] = ()


class RunHooks:
    """The hooks of one run; `state` gives the session as it stands."""

    def __init__(self, chain: Chain, session_id: str, state: Callable[[], State]) -> None:
        self._chain = chain
        self._session_id = session_id
        self._state = state
        self._entered: set[int] = set()

    def has(self, point: str) -> bool:
        return bool(self._chain.hooks[point])

    @property
    def holds_progress(self) -> bool:
        return self._chain.holds_progress

    def _context(self) -> HookContext:
        return HookContext(self._session_id, self._state())

    async def before_run(self) -> None:
        before = {hook.number for hook in self._chain.hooks["before_run"]}
        self._entered = {hook.number for hook in self._chain.hooks["after_run"]} - before
        for hook in self._chain.hooks["before_run"]:
            await hook(self._context())
            self._entered.add(hook.number)

    async def after_run(self, result: RunResult) -> None:
        """Of those whose before_run came to its end, each whatever became of the others; raises the first failure."""
        failed: HookFailed | None = None
        for hook in self._chain.hooks["after_run"]:
            if hook.number in self._entered:
                try:
                    await hook(self._context(), result)
                except HookFailed as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def around(self, provider: LlmProvider) -> LlmProvider:
        """The provider with the hooks before and after each of its calls."""
        if not (self.has("before_model") or self.has("after_model")):
            return provider
        return _HookedProvider(provider, self, holds_text=self._chain.holds_text)

    async def before_model(self, request: ModelRequest) -> ModelRequest:
        for hook in self._chain.hooks["before_model"]:
            given = _of_type(hook, await hook(self._context(), request), ModelRequest)
            if given is None or given is request:
                continue
            if given.messages is not request.messages:
                try:
                    strict_history(given.messages)
                except HistoryError as error:
                    raise hook.failed(f"no provider takes this history: {error}") from None
                except Exception as error:
                    raise hook.failed(f"its messages are none: {type(error).__name__}") from error
            request = replace(given, session_id=request.session_id, call_no=request.call_no)
        return request

    async def after_model(self, message: Message) -> Message:
        for hook in self._chain.hooks["after_model"]:
            given = _of_type(hook, await hook(self._context(), message.model_copy(deep=True)), Message)
            if given is None or given is message:
                continue
            ids = [call.id for call in given.tool_calls]
            if given.role != "assistant" or len(set(ids)) != len(ids) or not all(ids):
                raise hook.failed("a reply is an assistant's message whose calls have ids of their own")
            message = given.model_copy(update={"usage": message.usage}, deep=True)  # the hook may keep its own
        return message

    async def before_tool(self, call: ProposedCall, effect_of: Callable[[str], Effect]) -> Decided:
        """The final call; the first answer in its place ends the round. effect_of: of a tool, by its name."""
        by: list[str] = []
        for hook in self._chain.hooks["before_tool"]:
            given = await hook(self._context(), replace(call, arguments=deepcopy(call.arguments)))
            if given is None:
                continue
            by.append(hook.name)
            if not isinstance(given, ProposedCall):
                return Decided(call, _output(hook, given), tuple(by))
            if not (isinstance(given.tool, str) and isinstance(given.arguments, dict) and _is_json(given.arguments)):
                raise hook.failed("a call is a tool's name and a dict of arguments that has a JSON form")
            arguments = deepcopy(given.arguments)  # the hook may keep its own
            call = replace(call, tool=given.tool, arguments=arguments, effect=effect_of(given.tool))
        return Decided(call, None, tuple(by))

    async def after_tool(self, call: ProposedCall, output: ToolOutput) -> ToolOutput:
        for hook in self._chain.hooks["after_tool"]:
            given = await hook(self._context(), call, output)
            output = output if given is None else _output(hook, given)
        return output


def _is_json(value: dict[str, Any]) -> bool:
    try:
        compact_json(value).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _of_type(hook: _Hook, given: Any, kind: type[T]) -> T | None:
    if given is None or isinstance(given, kind):
        return given
    raise hook.failed(f"it gave a {type(given).__name__}; give a {kind.__name__}, or None to change nothing")


def _output(hook: _Hook, given: Any) -> ToolOutput:
    if isinstance(given, str | ToolOutput):
        return to_output(given)
    raise hook.failed(f"it gave a {type(given).__name__}; give a ToolOutput or a text, or None to change nothing")


class _HookedProvider:
    """What streams is held back where a hook may still change it; then it comes as one text."""

    def __init__(self, provider: LlmProvider, hooks: RunHooks, *, holds_text: bool) -> None:
        self._provider = provider
        self._hooks = hooks
        self._holds_text = holds_text

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        request = await self._hooks.before_model(request)
        whole: Message | None = None
        async with aclosing(self._provider.stream(request, cancel)) as deltas:  # type: ignore[type-var]  # streams are generators
            async for delta in deltas:
                if isinstance(delta, MessageDelta):
                    whole = delta.message
                elif not self._holds_text:
                    yield delta
        if whole is not None:  # the call is over: a hook holds no connection while it works
            message = await self._hooks.after_model(whole)
            if self._holds_text and message.text:
                yield TextDelta(text=message.text)
            yield MessageDelta(message=message)

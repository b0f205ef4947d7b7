"""Scripted: a model that plays a script. For demos and tests, and as the smallest example of a provider.

It keeps no position: entry `request.call_no` answers, so a session, its children and every item of a fan-out each
play the script from its start, and a recovered session goes on where it was.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import ConfigError, ProviderError
from greenroom.runtime.messages import (
    Block,
    Delta,
    Message,
    MessageDelta,
    TextBlock,
    TextDelta,
    ToolCallBlock,
    ToolCallDelta,
    Usage,
)
from greenroom.runtime.results import FailureKind
from greenroom.runtime.yaml_file import read_yaml


class Scripted:
    """`script`: entries, each a text, a mapping (calls, text, delay in seconds, usage, or error) or a callable.

    A callable takes the ModelRequest and answers an entry; it may be async. Past the end the call fails with kind
    provider_permanent. `name` is what errors call the script.
    """

    def __init__(self, script: Sequence[Any], *, name: str = "script") -> None:
        self.script = tuple(script)
        self.name = name
        self._made: dict[int, list[ToolCallBlock]] = {}
        for number, entry in enumerate(self.script):
            _check(entry, number, name)

    def preflight(self) -> None:
        """Needs nothing."""

    async def close(self) -> None:
        """Holds nothing."""

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        if request.call_no >= len(self.script):
            raise ProviderError(
                f"{self.name} has no entry {request.call_no}: it ends after {len(self.script)}",
                kind=FailureKind.provider_permanent,
                hint="Add an entry for every model call of the session",
            )
        entry = await self._entry(request)
        if entry.get("delay"):
            await asyncio.sleep(float(entry["delay"]))
        if "error" in entry:
            raise _error(entry["error"], self.name, request.call_no)
        text = str(entry.get("text") or "")
        for piece in text.splitlines(keepends=True):
            yield TextDelta(piece)
        calls = self._calls_of(entry, request.call_no)
        for index, call in enumerate(calls):
            yield ToolCallDelta(index, call.id, call.name, call.raw_arguments)
        yield MessageDelta(_message(text, calls, entry, request))

    def _calls_of(self, entry: dict[str, Any], call_no: int) -> list[ToolCallBlock]:
        """Made once for an entry that is written down; a thousand sessions may play it."""
        made = self._made.get(call_no)
        if made is None:
            made = [_call(call, call_no, index) for index, call in enumerate(entry.get("calls") or ())]
            if not callable(self.script[call_no]):
                self._made[call_no] = made
        return made

    async def _entry(self, request: ModelRequest) -> dict[str, Any]:
        """The entry of this call as a mapping."""
        entry: Any = self.script[request.call_no]
        if callable(entry):
            entry = entry(request)
            if inspect.isawaitable(entry):
                entry = await entry
            _check(entry, request.call_no, self.name)
        found: dict[str, Any] = {"text": entry} if isinstance(entry, str) else entry
        return found


def load_script(path: str, folder: str = ".") -> Scripted:
    """A script from a YAML list; `path` is relative to `folder`. Raises ConfigError."""
    file = Path(folder, path)
    script = read_yaml(file, "script")
    if not isinstance(script, list):
        raise ConfigError(f"the script {file} is no list", hint="Write one entry per model call, each after a dash")
    return Scripted(script, name=str(file))


def _call(call: dict[str, Any], call_no: int, index: int) -> ToolCallBlock:
    given = call.get("arguments")
    raw = given if isinstance(given, str) else json.dumps(given) if given else "{}"
    return ToolCallBlock(
        id=call.get("id") or f"call_{call_no}_{index}", name=call["name"], arguments=_object(raw), raw_arguments=raw
    )


def _message(text: str, calls: Sequence[ToolCallBlock], entry: dict[str, Any], request: ModelRequest) -> Message:
    content: list[Block] = [TextBlock(text=text)] if text else []
    content += calls
    said = sum(len(getattr(block, "text", "")) for block in request.messages[-1].content) if request.messages else 0
    usage = entry.get("usage") or {"input_tokens": said // 4 + 1, "output_tokens": len(text) // 4 + 1}
    default: tuple[str, str] = ("tool_calls", "tool_calls") if calls else ("stop", "end")
    return Message(
        role="assistant",
        content=tuple(content),
        stop=entry.get("stop") or default[0],
        stop_kind=entry.get("stop_kind") or default[1],
        usage=Usage.model_validate(usage),
    )


def _error(spec: dict[str, Any], name: str, number: int) -> ProviderError:
    kind = FailureKind(spec.get("kind", FailureKind.provider))
    return ProviderError(
        spec.get("message") or f"{name}, entry {number}: scripted {kind}",
        kind=kind,
        retryable=spec.get("retryable", kind.retryable),
        retry_after=spec.get("retry_after"),
        status=spec.get("status"),
        code=spec.get("code"),
    )


def _object(raw: str) -> dict[str, Any] | None:
    try:
        value = json.loads(raw) if raw else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_KEYS = {"text", "calls", "delay", "error", "usage", "stop", "stop_kind"}


def _check(entry: Any, number: int, name: str) -> None:
    """Raises ConfigError for an entry that nothing can be made of."""
    if isinstance(entry, str) or callable(entry):
        return
    where = f"{name}, entry {number}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {type(entry).__name__}", hint="An entry is a text, a mapping or a callable")
    unknown = set(entry) - _KEYS
    if unknown:
        raise ConfigError(f"{where}: unknown {', '.join(sorted(unknown))}", hint=f"Known: {', '.join(sorted(_KEYS))}")
    for call in entry.get("calls") or ():
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ConfigError(f"{where}: a call needs a name", hint="{name: bash, arguments: {command: ls}}")
    kind = (entry.get("error") or {}).get("kind", FailureKind.provider)
    if kind not in list(FailureKind):
        raise ConfigError(f"{where}: unknown error kind {kind!r}", hint=f"One of {', '.join(FailureKind)}")

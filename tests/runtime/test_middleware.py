"""Middleware: what hooks may change, in what order, what becomes of one that fails, and what they can never do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, over, results, scripted, tools, waits

from greenroom import (
    AgentConfig,
    AgentRuntime,
    CancelToken,
    ConfigError,
    FailureKind,
    HookContext,
    Limits,
    Message,
    MessageDelta,
    Middleware,
    ModelRequest,
    ProposedCall,
    RunFailed,
    RunResult,
    RunStatus,
    Scripted,
    Storage,
    SummaryCompactor,
    TextDelta,
    ToolContext,
    ToolOutput,
    ToolPolicy,
    Verdict,
)
from greenroom.runtime.agents import pack, unpack
from greenroom.runtime.journal import DENIED_BY_POLICY
from greenroom.runtime.messages import Delta, TextBlock
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeClock, FakeSandboxes, strict_history

SECRET = "hunter2"


class Traces(Middleware):
    """Writes down what it is called for."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name = name
        self.seen = seen

    async def before_run(self, ctx: HookContext) -> None:
        self.seen.append(f"{self.name}.before_run {ctx.state.name}")

    async def after_run(self, ctx: HookContext, result: RunResult) -> None:
        self.seen.append(f"{self.name}.after_run {result.status}")

    async def before_model(self, ctx: HookContext, request: ModelRequest) -> None:
        self.seen.append(f"{self.name}.before_model {request.call_no}")

    async def after_model(self, ctx: HookContext, message: Message) -> None:
        self.seen.append(f"{self.name}.after_model")

    async def before_tool(self, ctx: HookContext, call: ProposedCall) -> None:
        self.seen.append(f"{self.name}.before_tool {call.tool}")

    async def after_tool(self, ctx: HookContext, call: ProposedCall, output: ToolOutput) -> None:
        self.seen.append(f"{self.name}.after_tool {output.text}")

    async def close(self) -> None:
        self.seen.append(f"{self.name}.close")


def hook(point: str, function: Any, name: str = "hook", **more: Any) -> Any:
    """A middleware of this one hook."""

    async def method(self: Any, *args: Any) -> Any:
        made = function(*args)
        return await made if asyncio.iscoroutine(made) else made

    return type("Hook", (), {"name": name, point: method, **more})()


def fails(*_: Any) -> None:
    raise RuntimeError("hook broke")


def commands(sandboxes: FakeSandboxes, sid: str) -> list[str]:
    return sandboxes.opened[sid].commands if sid in sandboxes.opened else []


async def failed_run(runtime: AgentRuntime, agent: AgentConfig, sid: str = "s") -> RunFailed:
    session = await runtime.create_session(agent, sid)
    with pytest.raises(RunFailed) as failed:
        await session.run("go")
    strict_history((await session.transcript()).messages)
    return failed.value


async def test_hooks_wrap_runs_model_calls_and_tools_like_an_onion(home: Path, sandboxes: FakeSandboxes) -> None:
    seen: list[str] = []
    parts = [Traces("A", seen), Traces("B", seen)]
    async with AgentRuntime("memory:", sandboxes=sandboxes) as runtime:
        agent = scripted(bash("one"), "done", middleware=parts)
        parts.append(Traces("C", seen))
        session = await runtime.create_session(agent)
        await session.run("go")
    assert seen == [
        *["A.before_run Reasoning", "B.before_run Reasoning"],
        *["A.before_model 0", "B.before_model 0", "B.after_model", "A.after_model"],
        *["A.before_tool bash", "B.before_tool bash"],
        *[line for line in seen if ".after_tool" in line],
        *["A.before_model 1", "B.before_model 1", "B.after_model", "A.after_model"],
        *["B.after_run completed", "A.after_run completed"],
        *["B.close", "A.close"],
    ]
    assert [line[:12] for line in seen if ".after_tool" in line] == ["B.after_tool", "A.after_tool"]
    with pytest.raises(AttributeError):
        agent.middleware.append(parts[0])  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        agent.middleware = ()  # type: ignore[misc]


async def test_closing_goes_on_after_one_that_fails(home: Path) -> None:
    seen: list[str] = []
    parts = [Traces("A", seen), hook("close", fails), Traces("C", seen)]
    runtime = AgentRuntime("memory:")
    await (await runtime.create_session(scripted("done", middleware=parts))).run("go")
    await (await runtime.create_session(scripted("done", middleware=parts))).run("go")
    await runtime.close()
    await runtime.close()
    assert [line for line in seen if "close" in line] == ["C.close", "A.close"]


async def test_a_context_is_a_snapshot_that_nothing_leads_back_from(runtime: AgentRuntime) -> None:
    problems: list[type[BaseException]] = []

    def poke(ctx: HookContext, request: ModelRequest) -> None:
        assert [name for name in dir(ctx) if not name.startswith("_")] == ["session_id", "state"]
        for target, name in ((ctx, "session_id"), (ctx.state, "agent"), (ctx.state.agent, "step")):
            try:
                setattr(target, name, "other")
            except Exception as error:
                problems.append(type(error))

    session = await runtime.create_session(scripted("done", middleware=[hook("before_model", poke)]))
    assert (await session.run("go")).status is RunStatus.completed
    assert len(problems) == 3


async def test_a_request_is_changed_for_the_model_and_not_in_the_transcript(runtime: AgentRuntime) -> None:
    sent: list[ModelRequest] = []

    def answers(request: ModelRequest) -> str:
        sent.append(request)
        return "done"

    def scrub(ctx: HookContext, request: ModelRequest) -> ModelRequest:
        messages = tuple(Message.user(m.text.replace(SECRET, "***")) for m in request.messages)
        return replace(request, messages=messages, session_id="forged", call_no=99, temperature=0.5)

    session = await runtime.create_session(scripted(answers, middleware=[hook("before_model", scrub)]))
    await session.run(f"it is {SECRET}")
    (request,) = sent
    assert request.messages[0].text == "it is ***"
    assert (request.session_id, request.call_no, request.temperature) == (session.id, 0, 0.5)
    assert (await session.transcript()).messages[0].text == f"it is {SECRET}"


async def stored_bytes(objects: MemoryObjectStore) -> bytes:
    return b"".join([(await objects.get(key) or (b"", ""))[0] async for key in objects.list("")])


def redact(text: str) -> str:
    return text.replace(SECRET, "***")


class Redacts(Middleware):
    async def after_model(self, ctx: HookContext, message: Message) -> Message:
        content = [b.but(text=redact(b.text)) if isinstance(b, TextBlock) else b for b in message.content]
        return message.but(content=tuple(content))

    async def after_tool(self, ctx: HookContext, call: ProposedCall, output: ToolOutput) -> str:
        return redact(output.text)


async def leaks(ctx: ToolContext, how: str) -> str:
    ctx.progress.emit_text(f"progress {SECRET}")
    if how == "raises":
        raise ValueError(SECRET)
    return f"result {SECRET}"


async def test_what_a_hook_takes_out_is_in_no_event_and_in_no_store(home: Path) -> None:
    objects = MemoryObjectStore()
    agent = scripted(
        calls(call("leaks", how="returns"), call("leaks", how="raises"), text=f"let me see {SECRET}"),
        f"it is {SECRET}",
        tools=tools(leaks),
        middleware=[Redacts()],
    )
    async with AgentRuntime(Storage.over(objects)) as runtime:
        session = await runtime.create_session(agent)
        events = [event.to_json() async for event in session.stream("go")]
        transcript = await session.transcript()
    assert events[-1]["result"]["text"] == "it is ***"
    assert [event["text"] for event in events if event["type"] == "text"] == ["let me see ***", "it is ***"]
    assert [block.text for block in results(transcript)] == ["result ***", "ValueError: ***"]
    body = await stored_bytes(objects)
    assert b"***" in body
    documents = [key async for key in objects.list("agent/")]
    for key in documents:
        body = body.replace((await objects.get(key) or (b"", ""))[0], b"")  # the script itself holds it
    assert SECRET.encode() not in body
    assert SECRET not in str(events)


async def test_a_hook_that_says_so_lets_what_streams_be_watched(runtime: AgentRuntime) -> None:
    seen: list[str] = []
    traces = Traces("A", seen)
    traces.live = True
    agent = scripted(calls(call("leaks", how="returns")), "one two three", tools=tools(leaks), middleware=[traces])
    session = await runtime.create_session(agent)
    types = [event.type async for event in session.stream("go")]
    assert "tool_progress" in types
    held = scripted(calls(call("leaks", how="returns")), "done", tools=tools(leaks), middleware=[Traces("A", seen)])
    assert "tool_progress" not in [e.type async for e in (await runtime.create_session(held)).stream("go")]


async def test_the_partial_text_of_a_cancelled_call_is_not_kept_unseen(runtime: AgentRuntime) -> None:
    token = CancelToken()

    class SaysAndHangs:
        async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
            yield TextDelta(text=f"partial {SECRET}")
            token.cancel("enough")
            await asyncio.sleep(60)

    agent = AgentConfig(name="a", provider=SaysAndHangs(), middleware=[Redacts()])
    session = await runtime.create_session(agent)
    result = await session.run("go", cancel=token)
    assert result.status is RunStatus.cancelled
    assert SECRET not in str(await session.transcript())
    assert not result.text


async def test_an_answer_in_a_tools_place_is_its_result_and_it_does_not_run(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    def instead(ctx: HookContext, call: ProposedCall) -> ToolOutput | str | None:
        match call.arguments["command"]:
            case "a":
                return ToolOutput.of_text("no such thing", is_error=True)
            case "b":
                return "plain"
        return None

    later: list[str] = []
    after = hook("before_tool", lambda ctx, call: later.append(call.arguments["command"]))
    seen: list[str] = []
    batch = calls(call("bash", command="a"), call("bash", command="b"), call("bash", command="c"))
    agent = scripted(batch, "ok", middleware=[hook("before_tool", instead), after, Traces("T", seen)])
    session = await runtime.create_session(agent)
    events = [event async for event in session.stream("go")]
    assert commands(sandboxes, session.id) == ["c"]
    first, second, _ = results(await session.transcript())
    assert (first.text, first.is_error, second.text, second.is_error) == ("no such thing", True, "plain", False)
    assert later == ["c"], "the first answer ends the round"
    assert [line for line in seen if "after_tool" in line][:2] == ["T.after_tool no such thing", "T.after_tool plain"]
    told = [(e.call_key[-1], e.did, e.by) for e in events if e.type == "notice" and e.kind == "middleware"]
    assert told == [("0", "answered", ("hook",)), ("1", "answered", ("hook",))]


async def test_a_changed_call_runs_as_it_was_changed(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    def careful(ctx: HookContext, call: ProposedCall) -> ProposedCall:
        call.arguments["command"] += " -n"  # its own copy
        return call

    session = await runtime.create_session(scripted(bash("rm x"), "ok", middleware=[hook("before_tool", careful)]))
    await session.run("go")
    assert commands(sandboxes, session.id) == ["rm x -n"]
    (request,) = (await session.transcript()).messages[1].tool_calls
    assert request.arguments == {"command": "rm x"}, "what the model asked for stays what it asked for"


class Denies:
    """Never `rm`, never the tool `forbidden`; asks about `ask`."""

    def __init__(self) -> None:
        self.judged: list[tuple[str, Any]] = []

    async def judge(self, session_id: str, proposed: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        self.judged += [(one.tool, one.arguments) for one in proposed]
        return [self._verdict(one) for one in proposed]

    def _verdict(self, call: ProposedCall) -> Verdict:
        command = str(call.arguments.get("command", ""))
        if call.tool == "forbidden" or command.startswith("rm"):
            return Verdict("deny")
        return Verdict("ask" if command.startswith("ask") else "allow")


async def test_no_plugin_runs_a_denied_call(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    """By answering it, by changing it into one or out of one, by taking no notice of a cancellation."""
    ran: list[str] = []

    async def forbidden() -> str:
        ran.append("forbidden")
        return "ran"

    async def harmless() -> str:
        return "ran"

    def into(ctx: HookContext, call: ProposedCall) -> ProposedCall:
        return replace(call, tool="forbidden", key="another", effect="read_only")

    def mutates(ctx: HookContext, call: ProposedCall) -> None:
        call.arguments["command"] = "ls"

    def answers(ctx: HookContext, call: ProposedCall) -> str:
        return "as if it had run"

    def to_rm(ctx: HookContext, call: ProposedCall) -> ProposedCall:
        return replace(call, arguments={"command": "rm -rf /"})

    def to_ls(ctx: HookContext, call: ProposedCall) -> ProposedCall:
        return replace(call, arguments={"command": "ls"})

    own = tools(forbidden, harmless)
    everything = [*scripted("x").registry, *own]
    rows: list[tuple[Any, dict[str, Any], bool]] = [
        (into, call("harmless"), True),
        (mutates, call("bash", command="rm x"), True),
        (answers, call("bash", command="rm x"), True),
        (answers, call("forbidden"), True),
        (to_rm, call("bash", command="ls"), True),
        (to_ls, call("bash", command="rm x"), False),
    ]
    for number, (function, asked, denied) in enumerate(rows):
        for inner in (False, True):
            policy = Denies()
            chain = [hook("before_tool", function), Traces("T", [])]
            agent = scripted(
                calls(asked), "ok", tools=everything, policy=policy, middleware=chain[::-1] if inner else chain
            )
            session = await runtime.create_session(agent, f"s{number}{inner}")
            assert (await session.run("go")).status is RunStatus.completed
            (result,) = results(await session.transcript())
            assert result.text.startswith(DENIED_BY_POLICY) is denied, (function, result.text)
            assert commands(sandboxes, session.id) == ([] if denied else ["ls"])
            if not denied:
                assert policy.judged == [("bash", {"command": "ls"})], "judged by its final arguments"
    assert ran == []


async def test_an_answer_to_a_call_that_is_asked_about_waits_for_the_decision(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    agent = scripted(
        calls(call("bash", command="ask a"), call("bash", command="ask b")),
        "ok",
        policy=Denies(),
        middleware=[hook("before_tool", lambda ctx, call: "cached")],
    )
    session = await runtime.create_session(agent)
    first = (await session.run("go")).interrupt
    assert first is not None
    second = (await session.answer(first.id, {"decision": "allow"})).interrupt
    assert second is not None
    await session.answer(second.id, {"decision": "deny"})
    allowed, denied = results(await session.transcript())
    assert (allowed.text, allowed.is_error) == ("cached", False)
    assert denied.is_error
    assert commands(sandboxes, session.id) == []


@pytest.mark.parametrize(
    "point", ["before_run", "before_model", "after_model", "before_tool", "after_tool", "after_run"]
)
async def test_a_hook_that_swallows_a_cancellation_is_left_behind(
    runtime: AgentRuntime, sandboxes: FakeSandboxes, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenroom.runtime.middleware.HOOK_GRACE", 0.01)
    token, inside, released = CancelToken(), asyncio.Event(), asyncio.Event()

    async def stubborn(*_: Any) -> None:
        inside.set()
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    agent = scripted(bash("one"), "done", middleware=[hook(point, stubborn)])
    session = await runtime.create_session(agent)
    run = asyncio.create_task(session.run("go", cancel=token))
    await inside.wait()
    token.cancel("stop")
    result = await run
    ended = RunStatus.completed if point == "after_run" else RunStatus.cancelled
    assert result.status is ended
    assert commands(sandboxes, session.id) == (["one"] if point in ("after_tool", "after_run") else [])
    strict_history((await session.transcript()).messages)
    released.set()


@pytest.mark.parametrize(
    ("point", "ran", "executed"),
    [
        ("before_run", [], None),
        ("before_model", [], None),
        ("after_model", [], None),
        ("before_tool", [], False),
        ("after_tool", ["one"], True),
        ("after_run", ["one"], None),
    ],
)
async def test_a_hook_that_raises_ends_the_run_for_good(
    runtime: AgentRuntime, sandboxes: FakeSandboxes, point: str, ran: list[str], executed: bool | None
) -> None:
    agent = scripted(bash("one"), "done", "next", middleware=[hook(point, fails, "guard")])
    failed = await failed_run(runtime, agent)
    assert failed.failure.kind is FailureKind.middleware
    told = rf"middleware 'guard', {point}: RuntimeError in test_middleware.py, line \d+"
    assert re.fullmatch(told, failed.failure.message), "where, and not what it says: that may be a secret"
    assert failed.failure.tool_executed is executed
    assert not failed.resumable
    assert not failed.failure.retryable
    assert commands(sandboxes, "s") == ran
    session = await runtime.open("s", scripted("a", "b", "c", "d", "e"))
    assert (await session.run("go on")).status is RunStatus.completed, "the session goes on with the next message"


async def test_a_call_whose_result_a_hook_lost_is_told_as_it_was(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    def only_b(ctx: HookContext, call: ProposedCall, output: ToolOutput) -> None:
        if call.arguments["command"] == "b":
            raise RuntimeError("broke")

    batch = calls(call("bash", command="a"), call("bash", command="b"), call("bash", command="c"))
    await failed_run(runtime, scripted(batch, "x", middleware=[hook("after_tool", only_b)]))
    first, second, third = results(await (await runtime.open("s")).transcript())
    assert not first.is_error
    assert second.text == "This call has run, or may have; its result could not be passed on: middleware 'hook' failed."
    assert third.text.startswith("Not run")
    assert commands(sandboxes, "s") == ["a", "b"]


async def test_a_failed_hook_is_not_a_reason_to_try_the_fallback(runtime: AgentRuntime) -> None:
    asked: list[int] = []

    def count(request: ModelRequest) -> str:
        asked.append(request.call_no)
        return "never"

    agent = scripted("done", fallbacks=[Scripted([count])], middleware=[hook("after_model", fails)])
    await failed_run(runtime, agent)
    assert asked == []


async def test_an_after_run_is_called_for_those_that_had_begun(runtime: AgentRuntime) -> None:
    seen: list[str] = []
    await failed_run(
        runtime, scripted("done", middleware=[Traces("A", seen), hook("before_run", fails), Traces("C", seen)])
    )
    assert [line for line in seen if "run" in line] == ["A.before_run Reasoning", "A.after_run failed"]


async def test_runs_that_wait_are_interrupted_or_answered_are_wrapped_too(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    seen: list[str] = []
    agent = scripted(bash("ask x"), "done", policy=Denies(), middleware=[Traces("A", seen)])
    session = await runtime.create_session(agent)
    question = (await session.run("go")).interrupt
    assert question is not None
    await session.answer(question.id, {"decision": "allow"})
    assert [line for line in seen if "run" in line] == [
        *["A.before_run Reasoning", "A.after_run suspended"],
        *["A.before_run ToolExecuting", "A.after_run completed"],
    ]
    assert seen.count("A.before_tool bash") == 1, "a batch that waits is not hooked again"


BAD = [
    ("before_model", lambda *_: "text", "it gave a str; give a ModelRequest"),
    ("before_model", lambda ctx, request: replace(request, messages=()), None),
    (
        "before_model",
        lambda ctx, r: replace(r, messages=(Message(role="assistant", content=()),)),
        "no provider takes this",
    ),
    ("after_model", lambda *_: Message.user("not mine"), "a reply is an assistant's message"),
    ("before_tool", lambda *_: 7, "it gave a int; give a ToolOutput"),
    ("before_tool", lambda ctx, call: replace(call, arguments=None), "a call is a tool's name and a dict"),
    ("before_tool", lambda ctx, call: replace(call, arguments={"command": {1, 2}}), "that has a JSON form"),
    ("before_tool", lambda ctx, call: replace(call, tool="nope"), "a call of 'nope' that cannot run: Unknown tool"),
    ("before_tool", lambda ctx, call: replace(call, arguments={"x": 1}), "cannot run: Not run, bad arguments"),
    ("after_tool", lambda *_: 7, "it gave a int; give a ToolOutput"),
]


@pytest.mark.parametrize(("point", "function", "problem"), BAD)
async def test_what_a_hook_gives_is_checked(
    runtime: AgentRuntime, sandboxes: FakeSandboxes, point: str, function: Any, problem: str | None
) -> None:
    agent = scripted(bash("one"), "done", middleware=[hook(point, function)])
    if problem is None:
        assert (await (await runtime.create_session(agent)).run("go")).status is RunStatus.completed
        return
    failed = await failed_run(runtime, agent)
    assert problem in failed.failure.message
    assert commands(sandboxes, "s") == (["one"] if point == "after_tool" else [])


def test_what_is_no_middleware_is_refused_by_name() -> None:
    async def fine(self: Any, ctx: HookContext) -> None: ...

    def sync(self: Any, ctx: HookContext) -> None: ...

    rows: list[tuple[Any, str]] = [
        (Middleware(), "has no hook"),
        (object(), "has no hook"),
        (Middleware, "is a class"),
        (type("Typo", (), {"before_run": fine, "before_tools": fine})(), "unknown hook before_tools"),
        (type("Sync", (), {"before_run": sync})(), "before_run is no async function"),
    ]
    for part, problem in rows:
        with pytest.raises(ConfigError, match=problem):
            scripted("x", middleware=[part])


@dataclass
class Configured(Middleware):
    limit: int = 3

    async def before_run(self, ctx: HookContext) -> None: ...


class Bare(Middleware):
    async def before_run(self, ctx: HookContext) -> None: ...


def test_middleware_is_stored_with_its_agent_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = scripted("x", middleware=[Configured(7), Bare()])
    packet = pack(agent)
    assert not packet.locals
    first, second = unpack(packet).middleware
    assert first == Configured(7)
    assert type(second) is Bare
    (tmp_path / "hooks_of_mine.py").write_text(
        "class Audit:\n    async def before_run(self, ctx): ...\n\naudit = Audit()\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "agent.yaml").write_text(
        "name: a\nprovider: scripted:s.yaml\nmiddleware: [hooks_of_mine:audit, hooks_of_mine:Audit]\n", encoding="utf-8"
    )
    (tmp_path / "s.yaml").write_text("- done\n", encoding="utf-8")
    loaded = AgentConfig.load(tmp_path / "agent.yaml")
    assert [type(part).__name__ for part in loaded.middleware] == ["Audit", "Audit"]
    assert not pack(loaded).locals


async def test_a_childs_calls_are_its_own(runtime: AgentRuntime) -> None:
    seen: list[str] = []
    child = scripted(bash("child"), "child done", name="child")
    agent = scripted(
        calls(call("helper", task="t")), "done", subagents={"helper": child}, middleware=[Traces("P", seen)]
    )
    await (await runtime.create_session(agent)).run("go")
    assert next(line for line in seen if "_tool" in line) == "P.before_tool helper"
    assert len([line for line in seen if "before_model" in line]) == 2
    assert "child done" in next(line for line in seen if "after_tool" in line)


async def test_a_summary_passes_the_hooks_too(runtime: AgentRuntime) -> None:
    shown: list[str] = []

    def scrub(ctx: HookContext, request: ModelRequest) -> ModelRequest:
        return replace(
            request, messages=tuple(m.but(content=(TextBlock(text=redact(m.text)),)) for m in request.messages)
        )

    def summarize(request: ModelRequest) -> str:
        shown.append(request.messages[0].text)
        return "in short"

    agent = scripted(
        "one", "two", "three",
        middleware=[hook("before_model", scrub)],
        compactor=SummaryCompactor(max_tokens=10, keep=1, provider=Scripted([summarize] * 9)),
    )  # fmt: skip
    session = await runtime.create_session(agent)
    for _ in range(3):
        await session.run(f"remember {SECRET} " + "z" * 200)
    assert shown
    assert SECRET not in " ".join(shown)


async def test_rules_judge_what_hooks_made_of_a_call(runtime: AgentRuntime, sandboxes: FakeSandboxes) -> None:
    policy = ToolPolicy.rules([{"tool": "bash", "arguments": {"command": "rm *"}, "verdict": "deny"}])
    change = hook("before_tool", lambda ctx, call: replace(call, arguments={"command": "rm -r x"}))
    session = await runtime.create_session(scripted(bash("ls"), "ok", policy=policy, middleware=[change]))
    await session.run("go")
    assert commands(sandboxes, session.id) == []


async def test_nothing_that_a_hook_keeps_changes_a_call_after_it_was_judged(
    runtime: AgentRuntime, sandboxes: FakeSandboxes
) -> None:
    kept: list[dict[str, Any]] = []

    def keeps(ctx: HookContext, message: Message) -> Message:
        kept.extend(block.arguments for block in message.tool_calls if block.arguments is not None)
        return message

    def nested(ctx: HookContext, call: ProposedCall) -> ProposedCall:
        kept.append(call.arguments)
        return call

    def turns(ctx: HookContext, call: ProposedCall, output: ToolOutput) -> None:
        for arguments in kept:
            arguments.update({"command": "rm x", "task": "evil"})

    chain = [hook("after_model", keeps), hook("before_tool", nested), hook("after_tool", turns)]
    child = scripted("fine", name="child")
    batch = calls(call("bash", command="a"), call("helper", task="good"), call("bash", command="b"))
    policy = Denies()
    agent = scripted(batch, "ok", middleware=chain, policy=policy, subagents={"helper": child})
    session = await runtime.create_session(agent)
    await session.run("go")
    assert commands(sandboxes, session.id) == ["a", "b"]
    (below,) = (await session.tree()).children
    said = (await (await runtime.open(below.info.session_id)).transcript()).messages[0].text
    assert said == "good"
    assert [block.arguments for block in (await session.transcript()).messages[1].tool_calls] == [
        {"command": "a"},
        {"task": "good"},
        {"command": "b"},
    ]


HALF = "half \ud800 a character"


@pytest.mark.parametrize(
    ("point", "function"),
    [
        ("before_tool", lambda *_: ToolOutput.of_text(HALF)),
        ("before_tool", lambda ctx, call: replace(call, arguments={"command": HALF})),
        ("after_tool", lambda *_: ToolOutput.of_text(HALF)),
        ("after_tool", lambda *_: HALF),
        ("after_model", lambda ctx, message: message.but(content=(TextBlock(text=HALF),))),
    ],
)
async def test_half_characters_of_a_hook_do_no_harm(runtime: AgentRuntime, point: str, function: Any) -> None:
    session = await runtime.create_session(scripted(bash("one"), "done", middleware=[hook(point, function)]))
    try:
        result = await session.run("go")
    except RunFailed as failed:
        result = failed.result
    assert result.failure is None or result.failure.kind is FailureKind.middleware
    assert (await session.status()).owner is None, "the run has come to a stop"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError(HALF), asyncio.CancelledError()])
async def test_a_hook_ends_its_run_and_not_the_process(runtime: AgentRuntime, error: BaseException) -> None:
    def raises(*_: Any) -> None:
        raise error

    failed = await failed_run(runtime, scripted("x", middleware=[hook("before_model", raises)]))
    assert failed.failure.kind is FailureKind.middleware


async def test_a_large_answer_of_a_hook_is_no_part_of_the_head(home: Path) -> None:
    objects = MemoryObjectStore()
    big: list[int] = []

    def answers(ctx: HookContext, call: ProposedCall) -> str:
        return "z" * 300_000

    async def look() -> str:
        for key in [key async for key in objects.list("") if key.endswith("/head")]:
            big.append(len((await objects.get(key) or (b"", ""))[0]))
        return "seen"

    first = hook("before_tool", lambda ctx, call: answers(ctx, call) if call.tool == "bash" else None)
    own = tools(look)
    agent = scripted(calls(call("bash", command="a"), call("look")), "ok", middleware=[first])
    agent = replace(agent, tools=[*agent.registry, *own])
    async with AgentRuntime(Storage.over(objects), sandboxes=FakeSandboxes()) as runtime:
        session = await runtime.create_session(agent)
        await session.run("go")
        first_result = results(await session.transcript())[0]
    assert len(first_result.text) == 300_000
    assert big
    assert max(big) < 40_000


async def test_the_hooks_after_a_tool_are_no_part_of_its_time(timed: AgentRuntime, clock: FakeClock) -> None:
    async def slow(ctx: HookContext, call: ProposedCall, output: ToolOutput) -> str:
        await clock.sleep(50)
        return f"[{output.text}]"

    async def quick() -> str:
        return "quick"

    agent = scripted(
        calls(call("quick")),
        "ok",
        tools=tools(quick),
        sandbox=None,
        limits=Limits(tool_timeout=10),
        middleware=[hook("after_tool", slow)],
    )
    session = await timed.create_session(agent)
    await clock.run(session.run("go"))
    assert [block.text for block in results(await session.transcript())] == ["[quick]"]


async def test_a_close_that_hangs_holds_nobody_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.runtime.middleware.CLOSE_TIME", 0.01)
    seen: list[str] = []

    async def hangs(*_: Any) -> None:
        await asyncio.sleep(600)

    runtime = AgentRuntime("memory:")
    session = await runtime.create_session(scripted("done", middleware=[Traces("A", seen), hook("close", hangs)]))
    await session.run("go")
    await asyncio.wait_for(runtime.close(), 5)
    assert "A.close" in seen


async def test_a_reply_is_hooked_when_its_call_is_over(runtime: AgentRuntime) -> None:
    """A hook may ask the same provider, which allows one call at a time."""
    open_calls: list[int] = []

    class OneAtATime:
        def __init__(self) -> None:
            self.running = 0

        async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
            self.running += 1
            try:
                message = Message(role="assistant", content=(TextBlock(text="hi"),), stop="end", stop_kind="end")
                yield MessageDelta(message=message)
            finally:
                self.running -= 1

    provider = OneAtATime()
    look = hook("after_model", lambda *_: open_calls.append(provider.running))
    session = await runtime.create_session(AgentConfig(name="a", provider=provider, middleware=[look]))
    assert (await session.run("go")).text == "hi"
    assert open_calls == [0]


async def test_a_run_that_is_taken_over_and_ended_by_a_hook_ends_what_it_had_begun(shared: MemoryObjectStore) -> None:
    """Its children and its commands do not go on without it."""
    sandboxes, started = FakeSandboxes(), asyncio.Event()
    sandboxes._on_command = waits(started)
    child = scripted(bash("slow"), "never", name="child", sandbox=None)
    spawn = calls(call("helper", task="t"))
    async with over(shared, sandboxes) as first:
        session = await first.create_session(scripted(spawn, "x", subagents={"helper": child}), "s")
        run = asyncio.ensure_future(session.run("go"))
        await started.wait()
        async with over(shared) as second:
            agent = scripted(spawn, "x", subagents={"helper": child}, middleware=[hook("before_run", fails)])
            with pytest.raises(RunFailed) as failed:
                await (await second.open("s", agent)).resume()
            assert failed.value.failure.kind is FailureKind.middleware
            states = [info.state for info in (await (await second.open("s")).tree()).sessions()]
            assert states == ["Fail", "Interrupted"]
        run.cancel()


class DenyList(frozenset[str]):
    async def judge(self, session_id: str, proposed: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        return [Verdict("deny" if call.tool in self else "allow") for call in proposed]


def test_what_cannot_be_told_by_its_fields_travels_by_value() -> None:
    packet = pack(scripted("x", policy=DenyList({"bash"})))
    assert packet.locals
    assert unpack(packet).policy == DenyList({"bash"})


async def test_the_next_hook_sees_the_effect_of_the_changed_call(runtime: AgentRuntime) -> None:
    async def danger() -> str:
        return "done"

    seen: list[tuple[str, str]] = []
    chain = [
        hook("before_tool", lambda ctx, call: replace(call, tool="danger", arguments={})),
        hook("before_tool", lambda ctx, call: seen.append((call.tool, call.effect))),
    ]
    own = [*scripted("x").registry, *tools(danger)]
    session = await runtime.create_session(
        scripted(calls(call("read_file", path="a")), "ok", tools=own, middleware=chain)
    )
    await session.run("go")
    assert seen == [("danger", "effectful")]

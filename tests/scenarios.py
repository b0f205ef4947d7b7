"""The scenarios that crash_everywhere runs: each a small agent, with the effects that its name says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from scenes import bash, call, calls, default_registry, scripted

from greenroom import (
    AgentConfig,
    HookContext,
    Interrupt,
    Middleware,
    ModelRequest,
    ProposedCall,
    RunFailed,
    RunResult,
    SandboxSpec,
    Scripted,
    Storage,
    SubAgent,
    SummaryCompactor,
    ToolContext,
    ToolOutput,
    ToolRegistry,
    Verdict,
)
from greenroom.runtime.messages import Message, TextBlock, ToolResultBlock
from greenroom.runtime.sessions import read_transcript
from greenroom.runtime.testing.crash_world import SESSION
from greenroom.testing import CrashWorld, Scenario, drive_to_end


def registry() -> ToolRegistry:
    """Tools of the owner's own process, one of each effect class."""
    made = ToolRegistry()

    @made.tool(effect="read_only")
    async def look(what: str) -> str:
        return f"seen {what}"

    @made.tool(effect="idempotent")
    async def put(name: str, value: str) -> str:
        return f"put {name}={value}"

    @made.tool
    async def send(to: str) -> str:
        return f"sent to {to}"

    @made.tool
    async def fail(why: str) -> str:
        raise ValueError(why)

    return made


def own(*script: Any, **fields: Any) -> AgentConfig:
    return scripted(*script, **{"tools": registry(), "sandbox": None, **fields})


def both(*script: Any, **fields: Any) -> AgentConfig:
    """Tools of both kinds."""
    tools = [*default_registry(), *registry()]
    return scripted(*script, **{"tools": tools, **fields})


def plain() -> AgentConfig:
    return scripted(bash("one"), bash("two"), "done")


def reads() -> AgentConfig:
    return own(calls(call("look", what="a"), call("look", what="b"), call("look", what="c")), "done")


def effects() -> AgentConfig:
    return own(calls(call("send", to="a"), call("send", to="b")), calls(call("send", to="c")), "done")


def mixed() -> AgentConfig:
    batch = calls(
        call("look", what="a"),
        call("bash", command="one"),
        call("put", name="k", value="v"),
        call("send", to="b"),
        call("nope"),
        call("fail", why="boom"),
        call("look", what="b"),
    )
    return both(batch, bash("two"), "done")


def question() -> AgentConfig:
    batch = calls(call("bash", command="one"), call("askFollowupQuestion", question="?"), call("send", to="x"))
    return both(batch, bash("two"), "done")


class AsksAboutSend:
    async def judge(self, session_id: str, proposed: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        verdicts = {"send": Verdict("ask"), "put": Verdict("deny", "never")}
        return [verdicts.get(call.tool, Verdict("allow")) for call in proposed]


def approval() -> AgentConfig:
    batch = calls(call("bash", command="one"), call("send", to="x"), call("put", name="a", value="b"))
    return both(batch, "done", policy=AsksAboutSend())


class Marks(Middleware):
    """Answers a read in its tool's place, marks every result, and has a hook at every point."""

    async def before_run(self, ctx: HookContext) -> None: ...

    async def after_run(self, ctx: HookContext, result: RunResult) -> None: ...

    async def before_model(self, ctx: HookContext, request: ModelRequest) -> None: ...

    async def after_model(self, ctx: HookContext, message: Message) -> Message:
        return message.but(content=(TextBlock(text="[marked]"), *message.content))

    async def before_tool(self, ctx: HookContext, call: ProposedCall) -> str | None:
        return "kept" if call.arguments.get("what") == "kept" or call.tool == "put" else None

    async def after_tool(self, ctx: HookContext, call: ProposedCall, output: ToolOutput) -> str | None:
        return None if output.is_error else f"[marked] {output.text}"


def hooked() -> AgentConfig:
    """Hooks and a policy that denies, also what a hook answers, and asks."""
    batch = calls(
        call("look", what="kept"),
        call("put", name="a", value="b"),
        call("send", to="x"),
        call("bash", command="one"),
        call("send", to="y"),
    )
    return both(batch, calls(call("look", what="b")), "done", policy=AsksAboutSend(), middleware=[Marks()])


async def everything_was_marked(world: CrashWorld) -> list[str]:
    """No reply and no result got past the hooks, what they answered did not run, and the policy had the last word."""
    found = []
    transcript = await read_transcript(Storage.over(world.objects), SESSION)
    for message in transcript.messages:
        if message.role == "assistant" and message.stop != "cancelled" and not message.text.startswith("[marked]"):
            found.append(f"a reply that no hook saw: {message.text!r}")
        for block in message.content:
            if isinstance(block, ToolResultBlock) and not (block.is_error or block.text.startswith("[marked]")):
                found.append(f"a result that no hook saw: {block.text!r}")
    answered = [
        block for m in transcript.messages for block in m.content if getattr(block, "text", "").endswith("kept")
    ]
    found += ["a denied call was answered"] if len(answered) > 1 else []
    ran = [json.loads(key) for key in world.effects.began]
    return found + [f"{tool} ran" for tool, arguments in ran if tool == "put" or arguments.get("what") == "kept"]


def child_of(*script: Any, **fields: Any) -> AgentConfig:
    return both(*script, **{"name": "child", "sandbox": None, **fields})


def children() -> AgentConfig:
    child = child_of(bash("child one"), calls(call("send", to="c")), "child done")
    return both(bash("one"), calls(call("helper", task="t")), bash("two"), "done", subagents={"helper": child})


def family() -> AgentConfig:
    """Three levels; two children at once, one of which asks."""
    grandchild = child_of(bash("grandchild"), "g", name="grandchild")
    child = child_of(calls(call("deeper", task="d")), "c", subagents={"deeper": grandchild})
    asks = child_of(calls(call("askFollowupQuestion", question="?")), "never answered", name="asks")
    spawns = calls(call("helper", task="h"), call("asker", task="a"))
    subagents = {"helper": SubAgent(child, parallel=True), "asker": SubAgent(asks, parallel=True)}
    return both(spawns, bash("one"), "done", subagents=subagents)


def flaky_model() -> AgentConfig:
    error = {"error": {"kind": "provider_rate_limited", "retry_after": 1}}
    return own(error, calls(call("send", to="a")), error, "done")


def failing() -> AgentConfig:
    """Ends in Fail: the model is gone after an effect."""
    return own(calls(call("send", to="a")), {"error": {"kind": "provider_permanent"}})


def several_operations() -> AgentConfig:
    """A tool of the owner's process that works in the sandbox, twice."""
    made = ToolRegistry()

    @made.tool
    async def build(ctx: ToolContext, what: str) -> str:
        assert ctx.sandbox is not None
        await ctx.sandbox.write_file("f", b"x")
        await ctx.sandbox.read_file("f")
        return f"built {what}"

    return scripted(calls(call("build", what="a")), "done", tools=[*made])


def interrupting() -> AgentConfig:
    """A user's tool that asks, beside others."""
    made = registry()

    @made.tool(may_interrupt=True)
    async def form(what: str) -> Interrupt:
        return Interrupt(kind="form", payload={"what": what})

    batch = calls(call("send", to="a"), call("form", what="1"), call("form", what="2"), call("send", to="b"))
    return own(batch, "done", tools=made)


def long_history() -> AgentConfig:
    """Rolls and folds when the bounds are small."""
    big = [calls(call("look", what=f"{n} " + "z" * 3000), call("send", to=f"{n}")) for n in range(6)]
    return own(*big, "done")


def turns() -> AgentConfig:
    return own(calls(call("send", to="a")), "one", calls(call("send", to="b")), "two")


def saved() -> AgentConfig:
    """Writes files in a workspace that is lost with its sandbox and goes back to its last snapshot."""
    spec = SandboxSpec(kind="host", snapshots="on", snapshot_every=2)
    writes = [calls(call("write_file", path=f"f{n}", content=f"{n}")) for n in range(5)]
    return scripted(*writes, "done", tools=default_registry(), sandbox=spec)


async def no_loss_untold(world: CrashWorld) -> list[str]:
    """A file that was written, and is not there in the end, was named to the model."""
    transcript = await read_transcript(Storage.over(world.objects), SESSION)
    written = [
        call.arguments["path"]
        for message, following in pairwise(transcript.messages)
        for call, block in zip(message.tool_calls, following.content, strict=False)
        if isinstance(block, ToolResultBlock) and not block.is_error and call.arguments
    ]
    files = world.sandboxes.open_ones[-1].files if world.sandboxes.open_ones else {}
    missing = [path for path in written if path not in files]
    told = sum(message.text.count("write_file in step") for message in transcript.messages if message.role == "user")
    return [f"{missing} are lost, and the model was told of {told} calls"] if len(missing) > told else []


def compacting() -> AgentConfig:
    """Its older history is summarized again and again."""
    big = [calls(call("look", what=f"{n} " + "z" * 600), call("send", to=f"{n}")) for n in range(5)]
    compactor = SummaryCompactor(max_tokens=400, keep=2, provider=Scripted(["in short"] * 50))
    return own(*big, "done", compactor=compactor)


def jobs() -> AgentConfig:
    """A command that goes to the background, is looked after, and ended."""

    def look(tool: str) -> Any:
        def entry(request: ModelRequest) -> dict[str, Any]:
            shown = [b.text for m in request.messages for b in m.content if isinstance(b, ToolResultBlock)]
            ids = [json.loads(text)["id"] for text in shown if text.startswith('{"id"')]
            return calls(call(tool, id=ids[0] if ids else "job-none"))

        return entry

    return scripted(bash("serve"), bash("one"), look("check"), look("kill"), "done", tools=default_registry(2.0))


async def two_turns(world: CrashWorld) -> None:
    """A second message after the first is answered, submitted and then run."""
    await drive_to_end(world)
    session = await world.session()
    info = await session.status()
    if info.revision == 1 and info.state in ("Success", "Fail"):
        await session.submit("and again", request_id="second")
    for _ in range(10):
        info = await session.status()
        if info.state == "Success":
            return
        try:
            await (session.run() if info.state == "Ready" else session.resume())
        except RunFailed as failed:
            if not failed.resumable:
                return


SCENARIOS = [
    Scenario("plain", plain),
    Scenario("read-only batch", reads, sandboxes=("dies",)),
    Scenario("effect batch", effects, sandboxes=("dies",)),
    Scenario("mixed batch", mixed),
    Scenario("question and answer", question),
    Scenario("approval", approval),
    Scenario("hooks", hooked, sandboxes=("survives",), check=everything_was_marked),
    Scenario("interrupting tools", interrupting, sandboxes=("dies",)),
    Scenario("children", children),
    Scenario("family of three levels", family, sandboxes=("survives",)),
    Scenario("failing calls of the model", flaky_model, sandboxes=("dies",)),
    Scenario("a model that goes away", failing, sandboxes=("dies",)),
    Scenario("a tool with several operations", several_operations),
    Scenario("two turns", turns, two_turns, sandboxes=("dies",)),
    Scenario("long history", long_history, sandboxes=("dies",)),
    Scenario("background jobs", jobs, background=lambda command: command == "serve"),
    Scenario("a workspace that is lost", saved, check=no_loss_untold),
    Scenario("compaction", compacting, sandboxes=("dies",)),
    Scenario("every save waits", lambda: both(bash("one"), calls(call("send", to="a")), "done", durability="step")),
]

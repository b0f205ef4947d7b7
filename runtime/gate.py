"""The gate before a batch: hooks may change a call or answer it, then the policy judges what came of that. Once.

The policy has the last word. It judges the final calls, also one that a hook has answered: a call that it denies has
its denial as result, whatever a hook gave, and what runs is what it saw.
"""

from __future__ import annotations

from greenroom.runtime.calls import compact_json
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.emitter import Emitter
from greenroom.runtime.journal import Batch, CallRecord, Outcome
from greenroom.runtime.limits import Limits
from greenroom.runtime.messages import ToolCallBlock
from greenroom.runtime.middleware import HookFailed, RunHooks
from greenroom.runtime.policy import judged, proposed
from greenroom.runtime.record import Record
from greenroom.runtime.storage.head import Head
from greenroom.runtime.toolbox import Toolbox


async def pass_gate(record: Record, agent: AgentConfig, toolbox: Toolbox, hooks: RunHooks, emitter: Emitter) -> None:
    """Makes the open batch of `record` final, unless it is; raises HookFailed, BrokenPolicy."""
    head, batch = record.head, record.head.batch
    assert batch is not None, "a batch runs only while one is open"
    if batch.judged or not (hooks.has("before_tool") or agent.policy is not None):
        return
    if hooks.has("before_tool"):
        for call in batch.open_calls:
            batch = batch.put(await _hooked(call, toolbox, hooks, emitter))
        batch = refuse_spawns(batch, head, agent.limits)
    waiting = batch.open_calls
    batch = await judged(batch, agent.policy, head.session_id)
    for call in waiting if agent.policy is not None else ():
        verdict = batch.call(call.key).verdict
        emitter.emit("notice", kind="policy", call_key=call.key, tool=call.name, decision=verdict)
    record.update(batch=batch)


async def _hooked(call: CallRecord, toolbox: Toolbox, hooks: RunHooks, emitter: Emitter) -> CallRecord:
    """The call as the hooks would have it."""
    before = proposed(call)
    decided = await hooks.before_tool(before, toolbox.effect)
    final = decided.call
    if decided.by:
        did = "answered" if decided.answer is not None else "changed"
        emitter.emit("notice", kind="middleware", call_key=call.key, tool=call.name, did=did, by=decided.by)
    if final.tool != call.name or final.arguments != call.arguments:
        text = compact_json(final.arguments)
        block = ToolCallBlock(id=call.call_id, name=final.tool, arguments=final.arguments, raw_arguments=text)
        call = toolbox.record(block, call.key)
        if call.outcome is not None:
            problem = f"it made a call of {final.tool!r} that cannot run: {call.outcome.output.text}"
            raise HookFailed(", ".join(decided.by), "before_tool", problem, executed=False)
    return call if decided.answer is None else call.but(answered=Outcome.of(decided.answer))


def refuse_spawns(batch: Batch, head: Head, limits: Limits) -> Batch:
    """The batch with a refusal for every sub-agent that would be one too many, or nested too deep."""
    children = len(head.spawned)
    for call in batch.calls:
        if call.spawns and call.open and call.answered is None:
            children += 1
            refusal = _spawn_refusal(head.depth, children, limits)
            if refusal is not None:
                batch = batch.put(call.but(outcome=Outcome.error(refusal)))
    return batch


def _spawn_refusal(depth: int, children: int, limits: Limits) -> str | None:
    if depth >= limits.max_depth:
        return f"Not started: sub-agents may nest {limits.max_depth} levels deep (max_depth), this would be one more."
    if children > limits.max_children:
        return f"Not started: this session may start {limits.max_children} sub-agents (max_children) and has."
    return None

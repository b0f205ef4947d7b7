"""CPU of a step over HTTP, one JSON line each: 20 deltas a reply, with 10 and with 200 steps of history behind it.

A server in a process of its own streams a tool call at every request, in both dialects. Beside ours: a hand-written
loop over httpx that keeps the wire's own messages. Milliseconds of this process's CPU, the median over ten steps.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import httpx

from greenroom import AgentConfig, AgentRuntime, Anthropic, Limits, OpenAICompatible, ToolRegistry
from greenroom.runtime.testing.model_server import Answer, Dialect, call_pieces, end_pieces, model_server, text_pieces

STEPS = 210
DELTAS = 20
AT = {10: range(5, 15), 200: range(195, 205)}


def serve(pipe: Connection, dialect: Dialect) -> None:
    async def run() -> None:
        async with model_server() as server:
            call = call_pieces(dialect, "act", {"n": 1})
            if dialect == "anthropic":  # the call is the second block of the one message
                call = [piece.replace(b'"index": 0', b'"index": 1') for piece in call[1:]]
            pieces = [*text_pieces(dialect, ["word "] * (DELTAS - 2)), *call]
            reply = [*pieces, *end_pieces(dialect, calls=True)]
            body = b"".join(reply)
            half = len(body) // 2
            bodies = (body.replace(b"call_1", b"call_%06d" % number) for number in range(3 * STEPS))
            server.answers = [Answer([made[:half], made[half:]]) for made in bodies]
            pipe.send(server.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


def report(what: str, marks: list[float]) -> None:
    """`marks`: CPU seconds at the beginning of each step."""
    for behind, steps in AT.items():
        costs = [marks[step + 1] - marks[step] for step in steps]
        line = {"what": what, "steps_behind": behind, "cpu_ms_per_step": round(statistics.median(costs) * 1000, 2)}
        print(json.dumps(line), flush=True)


async def ours(url: str, dialect: Dialect) -> None:
    marks: list[float] = []
    tools = ToolRegistry()

    @tools.tool(effect="read_only")
    async def act(n: int) -> str:
        """Act."""
        marks.append(time.process_time())
        return "done"

    provider = OpenAICompatible("m", f"{url}/v1") if dialect == "openai" else Anthropic("m", url)
    agent = AgentConfig(name="b", provider=provider, tools=tools, limits=Limits(max_iter=STEPS))
    async with AgentRuntime("memory:") as runtime:
        await (await runtime.create_session(agent)).run("go")
    report(f"greenroom, {dialect}, memory", marks)


async def by_hand(url: str) -> None:
    marks: list[float] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    async with httpx.AsyncClient() as client:
        for number in range(STEPS):
            marks.append(time.process_time())
            call, text = {"name": "", "arguments": ""}, ""
            body = {"model": "m", "messages": messages, "stream": True}
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                async for line in lines(response):
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        delta = choice["delta"]
                        text += delta.get("content") or ""
                        for piece in delta.get("tool_calls") or ():
                            call["name"] += piece["function"].get("name") or ""
                            call["arguments"] += piece["function"]["arguments"]
            made = {"id": f"call_{number}", "type": "function", "function": call}
            messages.append({"role": "assistant", "content": text, "tool_calls": [made]})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": "done"})
    report("hand-written loop, openai, nothing kept", marks)


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        yield line


def main() -> None:
    for dialect in ("openai", "anthropic"):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=serve, args=(there, dialect), daemon=True)
        process.start()
        url = here.recv()
        if dialect == "openai":
            asyncio.run(by_hand(url))
        asyncio.run(ours(url, dialect))
        here.send("end")
        process.join(5)
        process.terminate()


if __name__ == "__main__":
    main()

"""CPU of 1,000 streamed deltas, one JSON line each: our providers beside the official SDKs, in one run.

The same server, in a process of its own, streams the same reply to all of them. The SDKs are no dependency:

    pip install -e '.[bench]'
    python benchmarks/decode.py
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from greenroom import Anthropic, CancelToken, Message, ModelRequest, OpenAICompatible
from greenroom.runtime.testing.model_server import Answer, Dialect, end_pieces, model_server, text_pieces

DELTAS = 1000
ROUNDS = 9


def serve(pipe: Connection, dialect: Dialect) -> None:
    async def run() -> None:
        async with model_server() as server:
            body = b"".join([*text_pieces(dialect, ["word "] * DELTAS), *end_pieces(dialect)])
            pieces = [body[start : start + 4096] for start in range(0, len(body), 4096)]
            server.answers = [Answer(pieces) for _ in range(200)]
            pipe.send(server.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


def ours(url: str, dialect: Dialect) -> Callable[[], Awaitable[str]]:
    provider = OpenAICompatible("m", f"{url}/v1") if dialect == "openai" else Anthropic("m", url)

    async def once() -> str:
        request = ModelRequest("s", 0, None, (Message.user("go"),))
        text = ""
        async for delta in provider.stream(request, CancelToken()):
            if delta.type == "message":
                text = delta.message.text
        return text

    return once


def sdk(url: str, dialect: Dialect) -> Callable[[], Awaitable[str]] | None:
    """The official client, its own accumulation of the reply included; None when it is not installed."""
    try:
        module: Any = importlib.import_module(dialect)
    except ImportError:
        return None
    if dialect == "openai":
        client = module.AsyncOpenAI(api_key="k", base_url=f"{url}/v1")

        async def openai_once() -> str:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], stream=True
            )
            parts = [
                chunk.choices[0].delta.content or ""
                async for chunk in stream
                if chunk.choices and chunk.choices[0].delta
            ]
            return "".join(parts)

        return openai_once
    client = module.AsyncAnthropic(api_key="k", base_url=url)

    async def anthropic_once() -> str:
        messages = [{"role": "user", "content": "go"}]
        async with client.messages.stream(model="m", max_tokens=9, messages=messages) as stream:
            return "".join([text async for text in stream.text_stream])

    return anthropic_once


async def measured(what: str, once: Callable[[], Awaitable[str]]) -> float:
    costs = []
    for _ in range(ROUNDS):
        began = time.process_time()
        text = await once()
        costs.append(time.process_time() - began)
        assert text == "word " * DELTAS
    cost = statistics.median(costs) * 1000
    print(json.dumps({"what": what, "deltas": DELTAS, "cpu_ms": round(cost, 1)}), flush=True)
    return cost


async def compare(url: str, dialect: Dialect) -> None:
    own = await measured(f"greenroom, {dialect}", ours(url, dialect))
    other = sdk(url, dialect)
    if other is None:
        print(json.dumps({"what": f"the {dialect} SDK", "missing": f"pip install {dialect}"}))
        return
    theirs = await measured(f"the {dialect} SDK", other)
    print(json.dumps({"what": f"{dialect}: SDK per ours", "ratio": round(theirs / own, 1)}))


def main() -> None:
    dialects: tuple[Dialect, ...] = ("openai", "anthropic")
    for dialect in dialects:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=serve, args=(there, dialect), daemon=True)
        process.start()
        asyncio.run(compare(here.recv(), dialect))
        here.send("end")
        process.join(5)
        process.terminate()


if __name__ == "__main__":
    main()

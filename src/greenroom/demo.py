"""`greenroom demo`: a lead and two sub-agents write a small program, test it, and run it.

The model is scripted, everything else is real: Ray, the actors, the sandbox, the store.
"""

from __future__ import annotations

import asyncio
import os

from greenroom import console
from greenroom.actors.client import RayRuntime, connect
from greenroom.actors.wire import PoolConfig
from greenroom.runtime.config import AgentConfig, SubAgent
from greenroom.runtime.protocols import Runtime
from greenroom.runtime.providers.scripted import Scripted
from greenroom.runtime.results import RunResult, RunStatus
from greenroom.runtime.sessions import read_head, read_transcript, read_tree
from greenroom.runtime.tools.builtin import default_tools

PROGRAM = '''\
"""Counts words."""

from collections import Counter


def count(text):
    return Counter(word.strip(".,!?").lower() for word in text.split())


if __name__ == "__main__":
    print(count("The green room is warm, and the stage is near.").most_common(2))
'''

TEST = """\
import unittest

from words import count


class WordsTest(unittest.TestCase):
    def test_case_and_punctuation_do_not_count(self):
        self.assertEqual(count("Go, go. GO!"), {"go": 3})

    def test_nothing_gives_nothing(self):
        self.assertEqual(count(""), {})


unittest.main()
"""


def _call(tool: str, **arguments: str) -> dict[str, object]:
    return {"name": tool, "arguments": arguments}


def demo_agent() -> AgentConfig:
    """The lead with its two sub-agents; plain data, so that the session can be opened again later."""
    tools = default_tools("host")
    coder = AgentConfig(
        name="coder",
        tools=tools,
        provider=Scripted(
            [
                {"text": "A Counter does it.", "calls": [_call("write_file", path="words.py", content=PROGRAM)]},
                {"calls": [_call("bash", command="python3 words.py")]},
                "words.py is written and runs.",
            ],
            name="coder's script",
        ),
    )
    tester = AgentConfig(
        name="tester",
        tools=tools,
        provider=Scripted(
            [
                {"calls": [_call("read_file", path="words.py")]},
                {"calls": [_call("write_file", path="test_words.py", content=TEST)]},
                {"calls": [_call("bash", command="python3 test_words.py -v")]},
                "Both tests of words.py pass.",
            ],
            name="tester's script",
        ),
    )
    return AgentConfig(
        name="lead",
        tools=tools,
        sandbox="host",
        subagents={
            "code": SubAgent(coder, description="Writes a program."),
            "test": SubAgent(tester, description="Writes and runs tests."),
        },
        provider=Scripted(
            [
                {"text": "First the program.", "calls": [_call("code", task="Write words.py, which counts words.")]},
                {"text": "Now its tests.", "calls": [_call("test", task="Write and run tests for words.py.")]},
                {
                    "text": "And a last look at all of it.",
                    "calls": [_call("bash", command="python3 test_words.py && python3 words.py")],
                },
                "Done: words.py counts words, test_words.py shows that it does.",
                "I am a script, and this is my last line. Give a real model with --model to go on from here.",
            ],
            name="lead's script",
        ),
    )


async def run_demo(store: str) -> int:
    """Runs the demo and shows it; answers the exit code."""
    console.err.print("[dim]starting a local Ray (some ten seconds) …[/dim]")
    async with connect(address="local", storage=store, pool=PoolConfig(session_actors=2)) as runtime:
        session = await runtime.create_session(demo_agent())
        live, result = console.LiveRun("lead"), None
        children: list[asyncio.Task[None]] = []
        async for event in session.stream("Write a small program that counts words, with tests."):
            live.show(event)
            if event.type == "child_started":
                name = "coder" if not children else "tester"
                children.append(asyncio.create_task(_show_child(runtime, event.child_id, name)))
            elif event.type == "tool_finished" and children:
                await asyncio.wait([children[-1]], timeout=5)
            elif event.type == "run_finished":
                result = event.result
        assert isinstance(result, RunResult)
        console.show_end(result)
        await _show_rest(runtime, session.id, store)
        return 0 if result.status is RunStatus.completed else 1


async def _show_child(runtime: Runtime, child_id: str, name: str) -> None:
    live = console.LiveRun(name, indent=1)
    async for event in (await runtime.open(child_id)).events(follow=True):
        live.show(event)
        if event.type == "run_finished":
            return


async def _show_rest(runtime: RayRuntime, root: str, store: str) -> None:
    tree = await read_tree(runtime.storage, root)
    labels = {root: "lead", **dict(zip(tree.info.children.values(), ("coder", "tester"), strict=False))}
    console.out.print("\n[bold]sessions[/bold]")
    console.out.print(console.session_tree(tree, labels))
    head = await read_head(runtime.storage, root)
    workspace = head.sandbox.spec.workspace if head.sandbox is not None else None
    if workspace is not None:
        console.out.print(f"\n[bold]files[/bold] in {workspace}")
        for name in sorted(os.listdir(workspace)):
            if not name.startswith((".", "__")):
                console.out.print(f"  {name}")
    transcript = await read_transcript(runtime.storage, root)
    results = [block for message in transcript.messages for block in message.content if block.type == "tool_result"]
    if results:
        console.out.print("\n[bold]what the last command gave[/bold]")
        console.out.print(f"  {results[-1].text}", markup=False)
    console.out.print(f"\n[bold]transcripts[/bold] in {store}")
    for line in (
        f"greenroom session show {root}",
        f"greenroom run --local --session {root} 'And now?'",
        "greenroom session list",
    ):
        console.out.print(f"  {line}", markup=False)

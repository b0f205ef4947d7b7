"""What takes real processes of the embedded edition: an owner that is stopped, taken over, and wakes up again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from scenes import alive, bash, results, scripted, until

from greenroom import AgentConfig, AgentRuntime, SandboxSpec
from greenroom.runtime.journal import OUTCOME_UNKNOWN
from greenroom.testing import strict_history

OWNER = """
import asyncio, sys
from greenroom import AgentRuntime, RunFailed
from test_processes import agent
async def main():
    async with AgentRuntime("sqlite:///" + sys.argv[1]) as runtime:
        session = await runtime.create_session(agent(sys.argv[2]), "s")
        try:
            print((await session.run("go")).status)
        except RunFailed as failed:
            print("lost", type(failed.__cause__).__name__)
asyncio.run(main())
"""


def agent(workspace: str) -> AgentConfig:
    sandbox = SandboxSpec(kind="host", workspace=workspace)
    return scripted(bash(f"sleep 1; echo x >> marker # {workspace}"), bash("echo y >> second"), "done", sandbox=sandbox)


def head(db: Path) -> dict[str, object]:
    """The session's head as it lies in the store; empty before there is one."""
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
            row = connection.execute("SELECT body FROM objects WHERE key = 'tree/s/s/head'").fetchone()
    except sqlite3.OperationalError:
        return {}
    found: dict[str, object] = json.loads(row[0]) if row else {}
    return found


async def test_c_an_owner_that_was_stopped_and_wakes_up_after_the_take_over_repeats_nothing(tmp_path: Path) -> None:
    """(c) SIGSTOP after the call's mark is durable, take over, SIGCONT: each line stands in its file once."""
    db, workspace = tmp_path / "greenroom.db", tmp_path / "workspace"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    owner = subprocess.Popen(  # noqa: ASYNC220  # a process to be stopped from outside
        [sys.executable, "-c", OWNER, str(db), str(workspace)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "GREENROOM_HOME": str(tmp_path / "home")},
    )
    try:
        await until(lambda: alive(f"# {workspace}"), "the command runs")
        assert '"started": {' in json.dumps(head(db)), "its mark is durable before it runs"
        os.kill(owner.pid, signal.SIGSTOP)
        async with AgentRuntime(f"sqlite:///{db}") as runtime:
            session = await runtime.open("s", agent(str(workspace)))
            result = await session.resume()
            assert result is not None
            assert result.text == "done"
            transcript = await session.transcript()
            strict_history(transcript.messages)
            assert [block.text == OUTCOME_UNKNOWN for block in results(transcript)] == [True, False]
            await until(lambda: (workspace / "marker").exists(), "the old owner's command ends by itself")
            os.kill(owner.pid, signal.SIGCONT)
            said, _ = await asyncio.to_thread(owner.communicate, timeout=60)
            assert said == "lost Fenced\n"
            assert (await session.status()).state == "Success"
        assert (workspace / "marker").read_text() == "x\n"
        assert (workspace / "second").read_text() == "y\n"
    finally:
        owner.kill()
        owner.communicate()

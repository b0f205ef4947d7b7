"""A real model on this machine, through the real command line and Ray: nothing here is scripted."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
from scenes import default_registry, greenroom, results

from greenroom import AgentConfig, AgentRuntime, Anthropic, OpenAICompatible, PreflightError, RunFailed, RunStatus
from greenroom.testing import strict_history

pytestmark = pytest.mark.model


def busy_slots(base: str) -> int:
    return sum(slot["is_processing"] for slot in httpx.get(f"{base}/slots", timeout=5).json())


@pytest.mark.ray
def test_the_bash_loop_runs_through_ray_and_a_real_model(model_server: str, tmp_path: Path) -> None:
    ran = greenroom(
        tmp_path,
        *("run", "Run the command: echo river-42", "--model", "openai:smollm2", "--sandbox", "host", "--json"),
        OPENAI_BASE_URL=f"{model_server}/v1",
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert "river-42" in result["text"]
    assert result["usage"]["input_tokens"] > 0
    shown = greenroom(tmp_path, "session", "show", result["session_id"])
    assert "call bash" in shown.stdout
    assert "echo river-42" in shown.stdout
    assert '"exit_code":0,"output":"river-42\\n"' in shown.stdout


def provider_of(dialect: str, server: str) -> OpenAICompatible | Anthropic:
    """The same server in either dialect."""
    return OpenAICompatible("smollm2", f"{server}/v1") if dialect == "openai" else Anthropic("smollm2", server)


both = pytest.mark.parametrize("dialect", ["openai", "anthropic"])


@both
async def test_cancelling_a_stream_frees_the_servers_slot(dialect: str, model_server: str, home: Path) -> None:
    agent = AgentConfig(name="talker", provider=provider_of(dialect, model_server))
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        text = ""
        async for event in session.stream("Tell me a very long story about a river."):
            if event.type == "text":
                text += event.text
            if len(text) > 20:
                break
        assert busy_slots(model_server) == 1
        result = await session.cancel("enough")
        assert result is not None
        assert result.status is RunStatus.cancelled
        assert result.text
        assert result.text.startswith(text)
        deadline = time.monotonic() + 5
        while busy_slots(model_server):
            assert time.monotonic() < deadline, "the server goes on generating"
            await asyncio.sleep(0.02)
        strict_history((await session.transcript()).messages)


@both
async def test_a_whole_loop_in_one_process(dialect: str, model_server: str, home: Path) -> None:
    provider = provider_of(dialect, model_server)
    agent = AgentConfig(
        name="shell", provider=provider, tools=default_registry(), sandbox="host", temperature=0.0, max_tokens=200
    )
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        *_, ended = [event async for event in session.stream("Please run `echo mango-7` and tell me the output")]
        # How long so small a model goes on talking differs from CPU to CPU.
        assert ended.result.status is RunStatus.completed or ended.result.failure.kind == "truncated"
        transcript = await session.transcript()
        strict_history(transcript.messages)
        assert any('"output":"mango-7\\n"' in block.text for block in results(transcript))
        assert all(m.usage is not None and m.usage.output_tokens for m in transcript.messages if m.role == "assistant")


@both
async def test_a_request_the_server_refuses_ends_the_run_with_its_words(
    dialect: str, model_server: str, home: Path
) -> None:
    agent = AgentConfig(name="long", provider=provider_of(dialect, model_server))
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        with pytest.raises(RunFailed, match="context size") as failed:
            await session.run("river " * 30_000)
        assert failed.value.failure.kind == "provider_permanent"


async def test_an_unreachable_model_is_tried_again_and_then_named(home: Path) -> None:
    agent = AgentConfig(name="away", provider=OpenAICompatible("m", base_url="http://127.0.0.1:9/v1"))
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        events = [event async for event in session.stream("hi")]
        assert [event.type for event in events].count("retry") == 2
        result = events[-1].result
        assert result.failure.kind == "provider"
        assert "http://127.0.0.1:9/v1 cannot be reached" in result.failure.message


async def test_a_missing_key_is_said_before_anything_is_sent(home: Path) -> None:
    agent = AgentConfig(name="keyless", provider="openai:gpt-5")
    async with AgentRuntime("memory:") as runtime:
        session = await runtime.create_session(agent)
        with pytest.raises(PreflightError, match="OPENAI_API_KEY is not set"):
            await session.run("hi")
        assert (await session.transcript()).messages == ()

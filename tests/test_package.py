"""The package from outside: what it holds, what importing it costs and starts, and that its public names are these."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import greenroom

ROOT = Path(__file__).parents[1]

PUBLIC = """
AgentConfig AgentRuntime AgentUnavailable AlreadyExists Anthropic CancelToken ClaimHeld ClusterError Compactor
ConfigError
Conflict Deleted EditRefused Event ExecResult Failure FailureKind Fenced GreenroomError IllegalTransition ImageBlock
HookContext Interrupt InterruptPending JobNotFound JobState Limits MapResult Message MessageDelta Middleware
ModelRequest NewerSchema
NotFound OpenAICompatible PathRefused PendingCall PoolConfig PoolMismatch PreconditionFailed PreflightError
ProposedCall ProviderError ReasoningBlock RedactedThinkingBlock RequestConflict RunFailed RunResult RunStatus Runtime
SandboxConflict SandboxDied SandboxError SandboxFenced SandboxLimits SandboxSpec SandboxUnavailable Scripted Session
SessionBusy SessionError SessionExists SessionInfo SessionNotFound SessionTree SkillError SkillManager
Storage StorageError SubAgent SummaryCompactor TextBlock TextDelta
ThinkingBlock ThinkingDelta Tool ToolCallBlock ToolCallDelta ToolContext ToolOutput ToolPolicy ToolRegistry
ToolResultBlock ToolSpec Transcript Turn Undecided UnknownInterrupt Usage UsageError Verdict connect
lookup_builtin_tool
register_default_tools rooted_read_tool
"""


def test_the_public_names_are_these_and_all_of_them_load() -> None:
    assert greenroom.__all__ == sorted(PUBLIC.split()) == sorted(greenroom.__all__)
    for name in greenroom.__all__:
        assert getattr(greenroom, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = greenroom.nothing_like_this


def test_importing_the_runtime_is_light_and_starts_nothing() -> None:
    script = """
import json, sys, threading, time
began = time.perf_counter()
import greenroom.runtime
took = time.perf_counter() - began
from greenroom import AgentRuntime, AgentConfig, Scripted
heavy = [name for name in ("ray", "boto3", "httpx", "rich", "typer") if name in sys.modules]
print(json.dumps({"took": took, "heavy": heavy, "threads": threading.active_count()}))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["heavy"] == []
    assert found["threads"] == 1
    assert ran.stderr == ""


def test_the_wheel_holds_the_linked_folders_and_the_licences(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "greenroom/__init__.py",
        "greenroom/py.typed",
        "greenroom/cli.py",
        "greenroom/runtime/machine.py",
        "greenroom/runtime/storage/sqlite.py",
        "greenroom/runtime/tools/builtin.py",
        "greenroom/runtime/providers/openai.py",
        "greenroom/actors/supervisor.py",
        "greenroom/sandbox/keeper.py",
    ):
        assert name in names
    assert {Path(name).name for name in names} >= {"LICENSE-MIT", "LICENSE-APACHE", "METADATA", "entry_points.txt"}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"greenroom", next(top for top in tops if top.endswith(".dist-info"))}
    metadata = next(name for name in names if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: MIT OR Apache-2.0" in text
    assert "Requires-Python: <3.14,>=3.11" in text


def test_no_file_names_a_registry_or_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "uv.lock" not in listed
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line, line
        assert "://" not in line


def test_every_test_that_the_requirements_name_is_there() -> None:
    page = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 60
    assert named - there == set()

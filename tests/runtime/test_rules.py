"""Policies as data: which rule fits, what it decides, and that rules are stored with their agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenes import bash, call, calls, results, scripted

from greenroom import AgentConfig, AgentRuntime, ConfigError, ProposedCall, RunStatus, Storage, ToolPolicy
from greenroom.runtime.rules import RulesPolicy
from greenroom.runtime.storage import MemoryObjectStore
from greenroom.testing import FakeSandboxes

RULES: list[dict[str, Any]] = [
    {"tool": "bash", "arguments": {"command": "git status*"}, "verdict": "allow"},
    {"tool": "bash", "arguments": {"command": "rm *"}, "verdict": "deny", "reason": "nothing is removed"},
    {"tool": "bash", "arguments": {"command": "*secret*"}, "verdict": "deny"},
    {"tool": "write_*", "arguments": {"path": "etc/*", "mode": "write"}, "verdict": "ask"},
    {"tool": "send", "arguments": {"to.domain": "*.example.com"}, "verdict": "allow"},
    {"tool": "send", "arguments": {"count": "1?"}, "verdict": "ask"},
    {"tool": "send", "verdict": "deny"},
]


def verdict(tool: str, **arguments: Any) -> str:
    return ToolPolicy.rules(RULES).verdict(ProposedCall("k", tool, arguments, "effectful")).decision


@pytest.mark.parametrize(
    ("tool", "arguments", "decision"),
    [
        ("bash", {"command": "git status -s"}, "allow"),
        ("bash", {"command": "git status; cat secret"}, "allow"),  # the first that fits, for better or worse
        ("bash", {"command": "rm -rf /"}, "deny"),
        ("bash", {"command": "rm"}, "allow"),  # a pattern is read as it stands
        ("bash", {"command": "RM x"}, "allow"),
        ("bash", {"command": "echo a\ncat secret\n"}, "deny"),  # `*` goes over lines
        ("bash", {}, "allow"),
        ("write_file", {"path": "etc/passwd", "mode": "write"}, "ask"),
        ("write_file", {"path": "etc/passwd", "mode": "append"}, "allow"),
        ("write_file", {"path": "etc/passwd"}, "allow"),
        ("send", {"to": {"domain": "a.example.com"}}, "allow"),
        ("send", {"to.domain": "a.example.com"}, "allow"),
        ("send", {"to": "a.example.com"}, "deny"),
        ("send", {"count": 12}, "ask"),
        ("send", {"count": 1}, "deny"),
        ("send", {"count": None}, "deny"),
        ("other", {}, "allow"),
    ],
)
def test_the_first_rule_that_fits_decides(tool: str, arguments: dict[str, Any], decision: str) -> None:
    assert verdict(tool, **arguments) == decision


def test_what_is_no_text_is_matched_as_its_json() -> None:
    policy = ToolPolicy.rules(
        [
            {"tool": "t", "arguments": {"a": '{"x":1,"y":[[]1,2]}'}, "verdict": "deny"},
            {"tool": "t", "arguments": {"a": "true"}, "verdict": "ask"},
        ]
    )
    decisions = [
        policy.verdict(ProposedCall("k", "t", {"a": a}, "effectful")).decision for a in ({"y": [1, 2], "x": 1}, True)
    ]
    assert decisions == ["deny", "ask"]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"tool": "bash"}, "verdict"),
        ({"verdict": "deny"}, "tool"),
        ({"tool": "bash", "verdict": "maybe"}, "verdict"),
        ({"tool": "bash", "verdict": "deny", "argument": {}}, "argument"),
        ({"tool": "bash", "verdict": "deny", "arguments": {"count": 1}}, "arguments.count"),
        ({"tool": ["bash"], "verdict": "deny"}, "tool"),
        ("deny everything", "no mapping"),
        (None, "no mapping"),
    ],
)
def test_a_rule_that_is_none_is_named(rule: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"rule 2 of the policy: .*{said}"):
        ToolPolicy.rules([{"tool": "a", "verdict": "allow"}, rule])


def test_rules_from_files(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("- {tool: bash, arguments: {command: 'rm *'}, verdict: deny}\n- {tool: '*', verdict: ask}\n")
    policy = ToolPolicy.rules(file)
    assert [rule.verdict for rule in policy.rules] == ["deny", "ask"]
    (tmp_path / "agent.yaml").write_text("name: a\nprovider: scripted:s.yaml\npolicy: policy.yaml\n")
    (tmp_path / "s.yaml").write_text("- done\n")
    assert AgentConfig.load(tmp_path / "agent.yaml").policy == policy
    (tmp_path / "inline.yaml").write_text("name: a\nprovider: scripted:s.yaml\npolicy:\n- {tool: x, verdict: deny}\n")
    assert AgentConfig.load(tmp_path / "inline.yaml").policy == ToolPolicy.rules([{"tool": "x", "verdict": "deny"}])
    for text, said in (("a: 1", "no list"), ("- [", "not valid YAML"), ("- x", "rule 1")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            ToolPolicy.rules(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        ToolPolicy.rules(tmp_path / "none.yaml")


async def test_a_run_under_rules_tells_what_was_decided(home: Path, shared: MemoryObjectStore) -> None:
    batch = calls(call("bash", command="rm x"), call("bash", command="ls"), call("bash", command="cat secret"))
    rules = [*RULES, {"tool": "bash", "arguments": {"command": "mv *"}, "verdict": "ask"}]
    agent = scripted(batch, bash("mv a b"), "done", policy=ToolPolicy.rules(rules))
    sandboxes = FakeSandboxes()
    async with AgentRuntime(Storage.over(shared), sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(agent, "s")
        told = [event.data async for event in session.stream("go") if event.type == "notice"]
        assert [(data["kind"], data["decision"]) for data in told] == [
            ("policy", "deny"),
            ("policy", "allow"),
            ("policy", "deny"),
            ("policy", "ask"),
        ]
        assert (await session.status()).waiting_for is not None
        first, _, third = results(await session.transcript())[:3]
        assert "nothing is removed" in first.text
        assert third.is_error
    async with AgentRuntime(Storage.over(shared), sandboxes=sandboxes) as runtime:
        session = await runtime.open("s")  # the rules were stored with the agent, and hold
        waiting = (await session.status()).waiting_for
        assert waiting is not None
        result = await session.answer(waiting.id, {"decision": "allow"})
        assert result.status is RunStatus.completed
        assert sandboxes.opened["s"].commands[-1] == "mv a b"
        driver = runtime._driver("s", None)
        stored = await runtime._host.shelf.get((await driver._host.storage.checkpoints.read("s"))[0].agent)  # type: ignore[index]
        assert stored.policy == RulesPolicy(rules=ToolPolicy.rules(rules).rules)

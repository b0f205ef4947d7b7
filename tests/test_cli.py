"""The command line as a person meets it: what it prints, its exit codes, and every mistake with its one clear line."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3servers
from scenes import greenroom

SCRIPT = """\
- calls: [{name: bash, arguments: {command: "echo from-bash"}}]
- the answer
- the second answer
"""
ASKS = """\
- calls: [{name: askFollowupQuestion, arguments: {question: "Which colour?", options: [red, blue]}}]
- thank you
"""
SLOW = """\
- calls: [{name: bash, arguments: {command: "touch began; sleep 50"}}]
- after
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.yaml").write_text(SCRIPT)
    (tmp_path / "asks.yaml").write_text(ASKS)
    return tmp_path


def local(folder: Path, *arguments: str, model: str = "scripted:script.yaml") -> subprocess.CompletedProcess[str]:
    return greenroom(folder, "run", *arguments, "--local", "--sandbox", "host", "--model", model)


def test_version_and_help(folder: Path) -> None:
    assert greenroom(folder, "--version").stdout == "greenroom 0.1.0\n"
    assert "demo" in greenroom(folder, "--help").stdout
    assert greenroom(folder, "nonsense").returncode == 2


def test_a_run_prints_the_answer_and_tells_the_rest_beside_it(folder: Path) -> None:
    ran = local(folder, "do it")
    assert ran.returncode == 0, ran.stderr
    assert "the answer" in ran.stdout
    assert "bash echo from-bash" in ran.stdout
    assert "completed" in ran.stderr
    assert (folder / ".greenroom" / "greenroom.db").exists()


def test_json_is_one_object_and_nothing_else(folder: Path) -> None:
    ran = local(folder, "do it", "--json")
    result = json.loads(ran.stdout)
    assert set(result) == {
        *("session_id", "status", "text", "usage", "steps", "revision", "interrupt", "failure", "background_tasks"),
    }
    assert (result["status"], result["text"]) == ("completed", "the answer")
    assert ran.stderr == ""


def test_a_session_is_listed_shown_and_gone_on_with(folder: Path) -> None:
    sid = json.loads(local(folder, "do it", "--json").stdout)["session_id"]
    listed = greenroom(folder, "session", "list", "--json")
    assert [json.loads(line)["session_id"] for line in listed.stdout.splitlines()] == [sid]
    assert sid in greenroom(folder, "session", "list").stdout
    shown = greenroom(folder, "session", "show", sid).stdout
    for part in ("user do it", "call bash", "from-bash", "assistant the answer"):
        assert part in shown
    document = json.loads(greenroom(folder, "session", "show", sid, "--json").stdout)
    assert document["info"]["state"] == "Success"
    went_on = greenroom(folder, "run", "and now?", "--session", sid, "--local")
    assert "the second answer" in went_on.stdout
    named = greenroom(
        folder,
        "run",
        "hi",
        *("--session", "my-own", "--local", "--sandbox", "host"),
        GREENROOM_MODEL="scripted:script.yaml",
    )
    assert named.returncode == 0, named.stderr
    assert "my-own" in greenroom(folder, "session", "list").stdout


def test_a_question_is_answered_by_another_process(folder: Path) -> None:
    asked = local(folder, "ask me", "--json", model="scripted:asks.yaml")
    assert asked.returncode == 3
    sid = json.loads(asked.stdout)["session_id"]
    shown = local(folder, "ask me", model="scripted:asks.yaml")
    assert "Which colour?" in shown.stderr
    assert "session answer" in shown.stderr
    answered = greenroom(folder, "session", "answer", sid, "blue", "--local")
    assert (answered.returncode, answered.stdout) == (0, "thank you\n")
    again = greenroom(folder, "session", "answer", sid, "red", "--local")
    assert again.returncode == 2
    assert "no open question" in again.stderr


@pytest.mark.ray
def test_a_question_is_answered_by_another_process_on_ray(folder: Path) -> None:
    asked = greenroom(folder, "run", "ask me", "--model", "scripted:asks.yaml", "--sandbox", "host", "--json")
    assert asked.returncode == 3, asked.stderr
    answered = greenroom(folder, "session", "answer", json.loads(asked.stdout)["session_id"], "blue", "--json")
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["text"] == "thank you"


def test_cancel_and_resume_by_the_store_alone(folder: Path) -> None:
    sid = json.loads(local(folder, "ask me", "--json", model="scripted:asks.yaml").stdout)["session_id"]
    cancelled = greenroom(folder, "session", "cancel", sid)
    assert cancelled.returncode == 5
    assert "session resume" in cancelled.stderr
    resumed = greenroom(folder, "session", "resume", sid, "--local")
    assert (resumed.returncode, resumed.stdout) == (0, "thank you\n")
    nothing = greenroom(folder, "session", "resume", sid, "--local")
    assert nothing.returncode == 0
    assert "nothing is in flight" in nothing.stderr


@contextlib.contextmanager
def hanging(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of the session "slow" in the middle of its bash call."""
    (folder / "slow.yaml").write_text(SLOW)
    options = ["--local", "--sandbox", "host", "--model", "scripted:slow.yaml", "--session", "slow"]
    process = subprocess.Popen(
        [sys.executable, "-m", "greenroom", "run", "go", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    began = folder / ".greenroom" / "workspaces" / "slow" / "began"
    deadline = time.monotonic() + 30
    while not began.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with process:
        yield process


def test_the_interrupt_key_cancels_and_keeps_the_session(folder: Path) -> None:
    with hanging(folder) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 5, err
    assert "cancelled" in err
    assert greenroom(folder, "session", "resume", "slow", "--local").stdout == "after\n"


def test_a_second_owner_is_refused_and_a_dead_ones_session_taken_over(folder: Path) -> None:
    with hanging(folder) as process:
        second = greenroom(folder, "run", "me too", "--session", "slow", "--local")
        assert second.returncode == 1
        assert "being run by local:" in second.stderr
        assert "resume" in second.stderr
        process.kill()
    resumed = greenroom(folder, "session", "resume", "slow", "--local")
    assert (resumed.returncode, resumed.stdout) == (0, "after\n")
    assert "Outcome unknown" in greenroom(folder, "session", "show", "slow").stdout


def test_stores_are_checked_and_cleaned_and_sessions_deleted(folder: Path) -> None:
    for url in ("memory:", "sqlite:///one.db", "file:///folder"):
        checked = greenroom(folder, "store", "check", url)
        assert checked.returncode == 0, checked.stderr
        assert checked.stdout.count("yes ") == 5
        assert "usable" in checked.stdout
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    away = greenroom(folder, "store", "check", "s3://b?endpoint=http://127.0.0.1:9", **keys)
    assert away.returncode == 1
    assert "cannot be used" in away.stderr
    sid = json.loads(local(folder, "do it", "--json").stdout)["session_id"]
    assert greenroom(folder, "session", "delete", sid).returncode == 0
    assert greenroom(folder, "session", "show", sid).returncode == 2
    assert not (folder / ".greenroom" / "workspaces" / sid).exists()
    cleaned = greenroom(folder, "store", "gc", "sqlite:///.greenroom/greenroom.db", "--days", "0")
    assert cleaned.stdout.startswith("1 objects")


def test_an_agent_file_and_an_agent_in_a_module(folder: Path) -> None:
    (folder / "child.yaml").write_text("name: child\nprovider: scripted:child-script.yaml\n")
    (folder / "child-script.yaml").write_text("- child says\n")
    (folder / "agent.yaml").write_text(
        "name: file\nprovider: scripted:parent-script.yaml\nsandbox: host\ntools: [default, mytools:shout]\n"
        "subagents: {helper: {agent: child.yaml, description: Helps.}}\nlimits: {max_iter: 5}\n"
    )
    (folder / "parent-script.yaml").write_text(
        "- calls: [{name: helper, arguments: {task: help}}, {name: shout, arguments: {text: hi}}]\n- done\n- again\n"
    )
    (folder / "mytools.py").write_text(
        "from greenroom import AgentConfig, Scripted\n\n"
        'def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n\n'
        'agent = AgentConfig(name="m", provider=Scripted(["from a module"]))\n'
    )
    ran = greenroom(folder, "run", "go", "--agent", "agent.yaml", "--local", "--json")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    sid = json.loads(ran.stdout)["session_id"]
    shown = greenroom(folder, "session", "show", sid).stdout
    assert "child says" in shown
    assert "result HI" in shown
    assert greenroom(folder, "run", "more", "--session", sid, "--local").returncode == 0
    module = greenroom(folder, "run", "go", "--agent", "mytools:agent", "--local")
    assert "from a module" in module.stdout


def case(name: str, arguments: list[str], code: int, *words: str, **environment: str) -> Any:
    return pytest.param(arguments, code, words, environment, id=name)


RUN = ["run", "hi", "--local", "--sandbox", "host"]


@pytest.mark.parametrize(
    ("arguments", "code", "words", "environment"),
    [
        case("no prompt", ["run"], 2, "no prompt"),
        case("no model", ["run", "hi"], 2, "no model", "--model"),
        case("unknown sandbox", ["run", "hi", "--model", "openai:x", "--sandbox", "jail"], 2, "'jail'", "host"),
        case("missing key", [*RUN, "--model", "openai:x"], 2, "OPENAI_API_KEY is not set"),
        case("unknown provider", [*RUN, "--model", "nope:x"], 2, "no provider 'nope'"),
        case("no provider", [*RUN, "--model", "gpt-5"], 2, "PROVIDER:MODEL"),
        case("missing agent file", [*RUN, "--agent", "nope.yaml"], 2, "nope.yaml", "No such file"),
        case("broken agent file", [*RUN, "--agent", "broken.yaml"], 2, "broken.yaml", "not valid YAML"),
        case("wrong field", [*RUN, "--agent", "wrong.yaml"], 2, "wrong.yaml", "unknown field nmae", "name"),
        case("missing module", [*RUN, "--agent", "nope:agent"], 2, "'nope' cannot be imported"),
        case("missing script", [*RUN, "--model", "scripted:nope.yaml"], 2, "nope.yaml"),
        case("no list in script", [*RUN, "--model", "scripted:wrong.yaml"], 2, "is no list"),
        case("unknown session", ["session", "show", "nope"], 2, "no session 'nope'"),
        case("unknown session resumed", ["session", "resume", "nope", "--local"], 2, "no session 'nope'"),
        case("unknown store", ["session", "list", "--store", "redis://x"], 2, "is no store"),
        case(
            "store not writable",
            ["session", "list", "--store", "sqlite:////proc/x/y.db"],
            1,
            "/proc/x",
            "can be written",
        ),
        case(
            "Ray not startable",
            ["run", "hi", "--sandbox", "host", "--model", "scripted:script.yaml"],
            1,
            "Ray cannot be started here",
            RAY_TMPDIR="/proc/nowhere",
        ),
        case(
            "unreachable model",
            [*RUN, "--model", "openai:x"],
            1,
            "cannot be reached",
            OPENAI_BASE_URL="http://127.0.0.1:9/v1",
        ),
    ],
)
def test_every_mistake_ends_with_a_clear_line(
    folder: Path, arguments: list[str], code: int, words: tuple[str, ...], environment: dict[str, str]
) -> None:
    (folder / "broken.yaml").write_text("name: [")
    (folder / "wrong.yaml").write_text("nmae: x\n")
    ran = greenroom(folder, *arguments, **environment)
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    for word in words:
        assert word in ran.stderr


def test_mistakes_before_a_run_are_json_too(folder: Path) -> None:
    ran = greenroom(folder, *RUN, "--model", "nope:x", "--json")
    assert ran.returncode == 2
    error = json.loads(ran.stdout)["error"]
    assert error["type"] == "ConfigError"
    assert "nope" in error["message"]
    assert error["hint"]


def test_settings_come_from_flag_then_environment_then_file(folder: Path) -> None:
    (folder / "greenroom.yaml").write_text("model: scripted:asks.yaml\nsandbox: host\nstore: sqlite:///from-file.db\n")
    (folder / "one.yaml").write_text("- from the environment\n")
    assert greenroom(folder, "run", "hi", "--local").returncode == 3
    by_environment = greenroom(folder, "run", "hi", "--local", GREENROOM_MODEL="scripted:one.yaml")
    assert "from the environment" in by_environment.stdout
    flag = ["--model", "scripted:script.yaml"]
    by_flag = greenroom(folder, "run", "hi", "--local", *flag, GREENROOM_MODEL="scripted:one.yaml")
    assert "the answer" in by_flag.stdout
    assert (folder / "from-file.db").exists()
    (folder / "greenroom.yaml").write_text("colour: red\n")
    assert greenroom(folder, "session", "list").returncode == 2


@pytest.mark.ray
def test_a_session_on_ray_lives_in_s3_and_goes_on_from_there(folder: Path, seaweedfs: str) -> None:
    store = f"s3://{s3servers.BUCKET}/{uuid.uuid4().hex}?endpoint={seaweedfs}&region=us-east-1"
    options = ["--store", store, "--json"]
    keys = s3servers.credentials()
    asked = greenroom(folder, "run", "ask", "--model", "scripted:asks.yaml", "--sandbox", "host", *options, **keys)
    assert asked.returncode == 3, asked.stderr
    sid = json.loads(asked.stdout)["session_id"]
    answered = greenroom(folder, "session", "answer", sid, "blue", "--local", *options, **keys)
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["text"] == "thank you"
    checked = greenroom(folder, "store", "check", store, **keys)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.ray
def test_the_demo_runs_without_key_or_network_and_leaves_no_process(folder: Path) -> None:
    ran = greenroom(folder, "demo")
    assert ran.returncode == 0, ran.stderr
    for part in ("coder", "tester", "words.py", "test_words.py", "Success", '"exit_code":0', "session show"):
        assert part in ran.stdout
    root = next(line.split()[-1] for line in ran.stdout.splitlines() if "session show" in line)
    assert "OK" in greenroom(folder, "session", "show", root).stdout
    went_on = greenroom(folder, "run", "And now?", "--local", "--session", root)
    assert went_on.returncode == 0, went_on.stderr


def test_a_terminal_gets_colours_and_a_pipe_does_not(folder: Path) -> None:
    command = [sys.executable, "-m", "greenroom", "run", "hi", "--local", "--sandbox", "host"]
    command += ["--model", "scripted:script.yaml"]
    piped = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=True)
    assert b"\x1b[" not in piped.stdout + piped.stderr
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, stdout=follower, stderr=follower, stdin=follower)
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:
        pass  # the terminal's other end is closed
    process.wait(60)
    os.close(leader)
    assert b"\x1b[" in shown
    assert b"the answer" in shown

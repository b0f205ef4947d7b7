"""Batches: each task one result, broken off anywhere and gone on with, and every mistake said before anything runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import s3servers
from scenes import call, calls, greenroom, scripted, tools

from greenroom import AgentConfig, AgentRuntime, ConfigError, ModelRequest, UsageError
from greenroom.batch import BatchReport, run_batch
from greenroom.bucket_files import batch_files

ONE = '{"prompt": "p"}\n'


def write_tasks(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"task {n}", "id": f"t{n}"}) + "\n" for n in range(count)))
    return path


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def answers(*entries: Any) -> AgentConfig:
    return scripted(*(entries or ("done",)), sandbox=None, tools=())


async def test_every_task_has_one_result_and_a_second_time_nothing_runs(runtime: AgentRuntime, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request.messages[0].text)
        return f"done {request.messages[0].text}"

    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 20), tmp_path / "sub" / "results.jsonl"
    seen: list[int] = []
    report = await run_batch(
        runtime, answers(answer), tasks, out, concurrency=4, told=lambda report: seen.append(report.done)
    )
    assert (report.total, report.found, dict(report.statuses), report.problems) == (20, 0, {"completed": 20}, [])
    assert seen == list(range(1, 21))
    found = read(out)
    assert {record["line"]: (record["id"], record["text"]) for record in found} == {
        n + 1: (f"t{n}", f"done task {n}") for n in range(20)
    }
    again = await run_batch(runtime, answers(answer), tasks, out, concurrency=4)
    assert (again.found, again.done, len(asked)) == (20, 20, 20)
    with tasks.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    more = await run_batch(runtime, answers(answer), tasks, out, concurrency=4)
    assert (more.found, dict(more.statuses)) == (20, {"completed": 1})


async def test_a_torn_last_line_is_cut_off_and_its_finished_session_is_not_run_again(
    runtime: AgentRuntime, tmp_path: Path
) -> None:
    asked: list[str] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request.session_id)
        return "done"

    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 6), tmp_path / "results.jsonl"
    await run_batch(runtime, answers(answer), tasks, out, concurrency=1)
    whole = out.read_bytes()
    out.write_bytes(whole[:-30])
    report = await run_batch(runtime, answers(answer), tasks, out, concurrency=1)
    assert (report.found, dict(report.statuses)) == (5, {"completed": 1})
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert len(asked) == 6


async def test_a_batch_that_is_left_parks_what_runs_and_goes_on(runtime: AgentRuntime, tmp_path: Path) -> None:
    began = asyncio.Event()
    hold = asyncio.Event()

    async def slow() -> str:
        began.set()
        await hold.wait()
        return "slow"

    agent = scripted(calls(call("slow")), "done", sandbox=None, tools=tools(slow, effect="idempotent"))
    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 4), tmp_path / "results.jsonl"
    run = asyncio.create_task(run_batch(runtime, agent, tasks, out, concurrency=2))
    await began.wait()
    run.cancel()
    await asyncio.wait([run])
    assert [info.state async for info in runtime.sessions()] == ["Interrupted"] * 2
    assert read(out) == []
    hold.set()
    report = await run_batch(runtime, agent, tasks, out, concurrency=2)
    assert sum(report.statuses.values()) == 4
    assert len(read(out)) == 4


async def test_failed_tasks_are_results_too(runtime: AgentRuntime, tmp_path: Path) -> None:
    def answer(request: ModelRequest) -> Any:
        return {"error": {"kind": "provider_permanent"}} if "3" in request.messages[0].text else "done"

    tasks, out = write_tasks(tmp_path / "tasks.jsonl", 5), tmp_path / "results.jsonl"
    report = await run_batch(runtime, answers(answer), tasks, out, concurrency=2)
    assert report.statuses == Counter(completed=4, failed=1)
    (failed,) = [record for record in read(out) if record["status"] == "failed"]
    assert (failed["id"], failed["failure"]["kind"]) == ("t3", "provider_permanent")


BAD = [
    ('{"prompt": 1}\n', "line 1: prompt: Input should be a valid string"),
    (ONE + "not json\n", "line 2: Invalid JSON"),
    ('{"promt": "x"}\n', "line 1: prompt: Field required; "),
    ("", "has no tasks"),
    ("\n \n", "has no tasks"),
    ('["prompt"]\n', "line 1: Input should be"),
    ("{\n" * 9, r"\(and 4 more\)"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
async def test_tasks_that_are_none_are_named_before_anything_runs(
    runtime: AgentRuntime, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said.removesuffix("; ")):
        await run_batch(runtime, answers(), tmp_path / "tasks.jsonl", tmp_path / "out.jsonl", concurrency=1)
    assert [info async for info in runtime.sessions()] == []


async def test_files_that_do_not_fit_are_refused(runtime: AgentRuntime, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1)

    async def run(tasks: Path, out: Path, concurrency: int = 1) -> BatchReport:
        return await run_batch(runtime, answers(), tasks, out, concurrency=concurrency)

    with pytest.raises(ConfigError, match="cannot be read"):
        await run(tmp_path / "missing.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"):
        await run(tasks, tmp_path)
    with pytest.raises(ConfigError, match="line 1 is no result"):
        await run(tasks, tasks)
    with pytest.raises(ConfigError, match="concurrency is 0"):
        await run(tasks, tmp_path / "out.jsonl", 0)
    began, hold = asyncio.Event(), asyncio.Event()

    async def slow(request: ModelRequest) -> str:
        began.set()
        await hold.wait()
        return "done"

    first = asyncio.create_task(run_batch(runtime, answers(slow), tasks, tmp_path / "out.jsonl", concurrency=1))
    await began.wait()
    with pytest.raises(UsageError, match="another process is writing"):
        await run(tasks, tmp_path / "out.jsonl")
    hold.set()
    await first


# -- from the command line, and killed

SCRIPT = """\
- calls: [{name: bash, arguments: {command: "echo x >> MARKER/$(pwd | md5sum | cut -c1-12)"}}]
- done
"""


def batch_command(folder: Path, *more: str) -> list[str]:
    files = [str(folder / "tasks.jsonl"), "--out", str(folder / "results.jsonl")]
    model = ["--model", f"scripted:{folder}/script.yaml", "--sandbox", "host"]
    store = ["--store", f"sqlite:///{folder}/greenroom.db"]
    return [sys.executable, "-m", "greenroom", "batch", "run", *files, *model, *store, *more]


def killed_at_half_and_gone_on(folder: Path, count: int, *more: str) -> None:
    """Killed -9 when half is there, continued: each line exactly one result, no effect twice."""
    write_tasks(folder / "tasks.jsonl", count)
    (folder / "effects").mkdir()
    (folder / "script.yaml").write_text(SCRIPT.replace("MARKER", str(folder / "effects")))
    environ = os.environ | {"GREENROOM_HOME": str(folder / "home")}
    first = subprocess.Popen(batch_command(folder, *more), env=environ, stderr=subprocess.DEVNULL)
    out, deadline = folder / "results.jsonl", time.monotonic() + 120
    while not out.exists() or out.read_bytes().count(b"\n") < count // 2:
        assert first.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    half = len(read(out)) if out.read_bytes().endswith(b"\n") else out.read_bytes().count(b"\n")
    done = subprocess.run(
        batch_command(folder, *more, "--json"), env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["total"] == count
    assert report["found"] == half
    records = read(out)
    assert sorted(record["line"] for record in records) == list(range(1, count + 1))
    effects = [path.read_text() for path in (folder / "effects").iterdir()]
    assert max(map(len, effects)) == 2, "no finished command ran again"
    assert {record["status"] for record in records} == {"completed"}


@pytest.mark.slow
def test_a_batch_that_was_killed_goes_on(tmp_path: Path) -> None:
    killed_at_half_and_gone_on(tmp_path, 60, "--local", "--concurrency", "4")


def test_the_command_line_of_a_batch(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 3)
    (tmp_path / "script.yaml").write_text("- done\n")
    options = ("tasks.jsonl", "--out", "r.jsonl", "--model", "scripted:script.yaml", "--sandbox", "host", "--local")
    done = greenroom(tmp_path, "batch", "run", *options)
    assert done.returncode == 0
    assert "3 completed" in done.stderr
    assert "results in r.jsonl" in done.stderr
    again = greenroom(tmp_path, "batch", "run", *options)
    assert "nothing to do, 3 found done" in again.stderr
    (tmp_path / "script.yaml").write_text("- {error: {kind: provider_permanent}}\n")
    failed = greenroom(tmp_path, "batch", "run", *options[:2], "other.jsonl", *options[3:])
    assert failed.returncode == 1
    assert "3 failed" in failed.stderr
    missing = greenroom(tmp_path, "batch", "run", "nope.jsonl", *options[1:])
    assert missing.returncode == 2
    assert "cannot be read" in missing.stderr


@pytest.mark.slow
def test_the_files_of_a_batch_may_lie_in_a_bucket(tmp_path: Path, seaweedfs: str) -> None:
    s3 = s3servers.client(seaweedfs)
    put = b"".join(json.dumps({"prompt": f"task {n}"}).encode() + b"\n" for n in range(4))
    s3.put_object(Bucket=s3servers.BUCKET, Key="in/tasks.jsonl", Body=put)
    (tmp_path / "script.yaml").write_text("- done\n")
    where = f"?endpoint={seaweedfs}&region=us-east-1"
    tasks, out = f"s3://{s3servers.BUCKET}/in/tasks.jsonl{where}", f"s3://{s3servers.BUCKET}/results.jsonl{where}"
    options = ("--model", "scripted:script.yaml", "--sandbox", "host", "--local", "--json")
    keys = s3servers.credentials()
    done = greenroom(tmp_path, "batch", "run", tasks, "--out", out, *options, **keys)
    assert done.returncode == 0, done.stderr
    body = s3.get_object(Bucket=s3servers.BUCKET, Key="results.jsonl")["Body"].read()
    assert sorted(json.loads(line)["line"] for line in body.splitlines()) == [1, 2, 3, 4]
    s3.put_object(Bucket=s3servers.BUCKET, Key="results.jsonl", Body=body.splitlines(keepends=True)[0])
    again = greenroom(tmp_path, "batch", "run", tasks, "--out", out, *options, **keys)
    assert json.loads(again.stdout)["found"] == 1
    after = s3.get_object(Bucket=s3servers.BUCKET, Key="results.jsonl")["Body"].read()
    assert sorted(after.splitlines()) == sorted(body.splitlines()), "finished sessions give theirs again"
    missing = greenroom(tmp_path, "batch", "run", tasks.replace("tasks", "nope"), "--out", out, *options[:-1], **keys)
    assert missing.returncode == 2
    assert "is not there" in missing.stderr


@pytest.mark.slow
async def test_results_that_somebody_else_put_are_not_overwritten(
    tmp_path: Path, seaweedfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3servers.credentials().items():
        monkeypatch.setenv(name, value)
    out = f"s3://{s3servers.BUCKET}/two/results.jsonl?endpoint={seaweedfs}&region=us-east-1"
    with pytest.raises(UsageError, match="somebody else"):  # noqa: PT012  # it is leaving that raises
        async with batch_files("tasks.jsonl", out) as files:
            files.out.write_bytes(b'{"line": 1}\n')
            s3servers.client(seaweedfs).put_object(Bucket=s3servers.BUCKET, Key="two/results.jsonl", Body=b"theirs\n")
    async with batch_files("tasks.jsonl", out) as files:
        assert files.out.read_bytes() == b"theirs\n"
        with files.out.open("ab") as file:
            file.write(b'{"line": 2}\n{"li')
    async with batch_files("tasks.jsonl", out) as files:
        assert files.out.read_bytes() == b'theirs\n{"line": 2}\n', "a line that is not whole yet stays here"

"""The examples and the README's program run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "hello": "Clear in Bern tomorrow.",
    "approval": "completed Deployed, as allowed.",
    "cancel_and_resume": "completed I was stopped; done.",
    "sub_agents": "completed Both parts are done.",
}


def run(program: Path, folder: Path, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": "local", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.ray
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    assert SAYS[path.stem] in run(path, tmp_path)


@pytest.mark.model
def test_the_readmes_program_runs_with_a_real_model(model_server: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "readme.py").write_text(program.replace("openai:gpt-5", "openai:smollm2"))
    assert "completed" in run(tmp_path / "readme.py", tmp_path, OPENAI_BASE_URL=f"{model_server}/v1")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_the_programs_in_the_docs_run(page: Path, tmp_path: Path) -> None:
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        (tmp_path / f"{number}.py").write_text(program)
        run(tmp_path / f"{number}.py", tmp_path)


def test_the_pages_name_files_that_are_there() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"

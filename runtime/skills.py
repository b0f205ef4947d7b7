"""Skills: folders of instructions that a model reads when it needs them. It sees an index; `readSkill` gives the rest.

A skill is a folder with a SKILL.md: front matter in YAML with `name` and `description`, then the instructions; every
other file in it is a resource. Its id is the folder's name. All of it is read once, when an agent is made, and travels
with the agent: no other machine needs the folder. A bad skill is told of and hides no other.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from greenroom.runtime.errors import GreenroomError

SKILL_FILE = "SKILL.md"
MAX_SKILLS_BYTES = 4 * 1024 * 1024
"""Bytes of all skills of an agent, resources included: they are stored and shipped with it."""

MAX_FILES = 1000
"""Files of one skill."""

SkillProblem = Literal[
    "root_not_found", "skill_not_found", "resource_not_found", "invalid_path", "invalid_metadata", "duplicate", "io"
]

log = logging.getLogger("greenroom.skills")
_PLAIN = re.compile(r"([A-Za-z_][\w-]*):[ \t]+(?![\"'\[{>|&*!%#@`])(.*\S)\s*")


class SkillError(GreenroomError, ValueError):
    """`kind`: see SkillProblem; `skill_id`: the skill it is about, if it is about one."""

    def __init__(self, message: str, kind: SkillProblem, skill_id: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.skill_id = skill_id


@dataclass(frozen=True, slots=True)
class Skill:
    """body: the instructions; resources: by path below the folder; refused: paths that lead out of it."""

    id: str
    name: str
    description: str
    body: str
    resources: Mapping[str, bytes] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self.body.encode()) + sum(len(path) + len(data) for path, data in self.resources.items())


@dataclass(frozen=True, slots=True)
class BrokenSkill:
    """A folder whose SKILL.md is no skill; `line`: where, counted from 1."""

    id: str
    file: str
    line: int
    problem: str


@dataclass(frozen=True, slots=True)
class SkillText:
    """What `read` gives; `path`: the resource, None for the instructions; `resources`: paths of all of them."""

    skill_id: str
    path: str | None
    content: str
    resources: tuple[str, ...]


class SkillManager:
    """Skills by id. Works by itself: no runtime is needed."""

    def __init__(self, skills: Iterable[Skill] = (), broken: Iterable[BrokenSkill] = ()) -> None:
        self._skills: dict[str, Skill] = {}
        self.broken = tuple(broken)
        for skill in skills:
            if skill.id in self._skills:
                raise SkillError(f"there are two skills {skill.id!r}", "duplicate", skill.id, hint="Rename a folder")
            self._skills[skill.id] = skill
        size = sum(skill.size for skill in self._skills.values())
        if size > MAX_SKILLS_BYTES:
            raise SkillError(
                f"the skills have {size} bytes, more than {MAX_SKILLS_BYTES}", "io", hint="Move large files elsewhere"
            )

    @classmethod
    def discover_dirs(cls, folders: Iterable[str | Path]) -> SkillManager:
        """The skills of these folders: one that holds a SKILL.md is a skill, else each folder in it that does is one.

        Raises SkillError: root_not_found, duplicate, io. A bad SKILL.md is logged and listed in `broken`.
        """
        found: list[Skill] = []
        broken: list[BrokenSkill] = []
        for folder in folders:
            root = Path(folder).expanduser()
            if not root.is_dir():
                raise SkillError(f"there is no folder of skills {root}", "root_not_found", hint="Name one that exists")
            below = [root.absolute()] if (root / SKILL_FILE).is_file() else sorted(root.absolute().iterdir())
            for place in below:
                if (place / SKILL_FILE).is_file():
                    skill = _loaded(place)
                    (found if isinstance(skill, Skill) else broken).append(skill)  # type: ignore[arg-type]
        for one in broken:
            log.warning("%s:%d is no skill: %s", one.file, one.line, one.problem)
        return cls(found, broken)

    def list(self) -> tuple[Skill, ...]:
        """In the order they were found."""
        return tuple(self._skills.values())

    def read(self, skill_id: str, path: str | None = None) -> SkillText:
        """The instructions, or a resource; raises SkillError: skill_not_found, invalid_path, resource_not_found, io."""
        skill = self._skills.get(skill_id)
        if skill is None:
            known = ", ".join(self._skills) or "none"
            raise SkillError(f"there is no skill {skill_id!r}", "skill_not_found", skill_id, hint=f"There are: {known}")
        resources = tuple(skill.resources)
        if path is None:
            return SkillText(skill.id, None, skill.body, resources)
        data = skill.resources.get(_inner(path, skill))
        if data is None:
            raise SkillError(
                f"the skill {skill_id!r} has no resource {path!r}",
                "resource_not_found",
                skill_id,
                hint=f"It has: {', '.join(resources) or 'none'}",
            )
        try:
            return SkillText(skill.id, path, data.decode("utf-8"), resources)
        except UnicodeDecodeError:
            raise SkillError(f"{path!r} is no text ({len(data)} bytes)", "io", skill_id) from None

    def index(self) -> str:
        """What a model is told of the skills at the start; empty when there are none."""
        if not self._skills:
            return ""
        lines = [f"- {skill.id}: {skill.name}. {skill.description}" for skill in self._skills.values()]
        return "Skills you can read with readSkill(skill_id) before you use them:\n" + "\n".join(lines)

    def to_json(self) -> Sequence[dict[str, Any]]:
        """Plain data, for an agent's document."""
        return [
            {
                "id": skill.id,
                "name": skill.name,
                "description": skill.description,
                "body": skill.body,
                "resources": {path: b64encode(data).decode() for path, data in skill.resources.items()},
            }
            for skill in self._skills.values()
        ]

    @classmethod
    def from_json(cls, document: Iterable[Mapping[str, Any]]) -> SkillManager:
        return cls(
            Skill(**{**entry, "resources": {path: b64decode(data) for path, data in entry["resources"].items()}})
            for entry in document
        )

    def __bool__(self) -> bool:
        return bool(self._skills)


def _inner(path: str, skill: Skill) -> str:
    """The path below the skill's folder, made plain; raises SkillError(invalid_path)."""
    parts = path.split("/")
    inner = os.path.normpath(path) if path else ""
    if not path or "\0" in path or path.startswith("/") or "\\" in path or ".." in parts or inner in skill.refused:
        raise SkillError(f"{path!r} is no path in the skill {skill.id!r}", "invalid_path", skill.id)
    return inner


def _loaded(folder: Path) -> Skill | BrokenSkill:
    """The skill in a folder; raises SkillError(io) when it cannot be read."""
    file = folder / SKILL_FILE
    try:
        text = file.read_bytes().decode("utf-8-sig")
        resources, refused = _resources(folder)
    except UnicodeDecodeError:
        return BrokenSkill(folder.name, str(file), 1, "it is not UTF-8 text")
    except OSError as error:
        raise SkillError(f"{file} cannot be read: {error.strerror}", "io", folder.name) from error
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if lines[0].rstrip() != "---":
        return BrokenSkill(folder.name, str(file), 1, "it does not begin with front matter: a line ---")
    close = next((number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"), None)
    if close is None:
        return BrokenSkill(folder.name, str(file), 1, "its front matter has no closing line ---")
    try:
        front = _front_matter(lines[1:close])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        return BrokenSkill(folder.name, str(file), 2 + (mark.line if mark else 0), f"{error.problem}")
    except yaml.YAMLError as error:
        return BrokenSkill(folder.name, str(file), 2, str(error))
    for key in ("name", "description"):
        value = front.get(key) if isinstance(front, dict) else None
        if not isinstance(value, str) or not value.strip():
            line = next((n for n, text in enumerate(lines[:close], start=1) if text.startswith(f"{key}:")), 2)
            return BrokenSkill(folder.name, str(file), line, f"its {key} is missing or no text")
    assert isinstance(front, dict)
    body = "\n".join(lines[close + 1 :]).strip("\n")
    name, description = (" ".join(front[key].split()) for key in ("name", "description"))
    return Skill(folder.name, name, description, body, resources, refused)


def _front_matter(lines: list[str]) -> Any:
    """Its value; a text that only lacks its quotes, such as one with a colon in it, is taken as it was meant."""
    try:
        return yaml.safe_load("\n".join(lines))
    except yaml.YAMLError:
        quoted = [_quoted(line) for line in lines]
        if quoted == lines:
            raise
    return yaml.safe_load("\n".join(quoted))


def _quoted(line: str) -> str:
    found = _PLAIN.fullmatch(line)
    if found is None or ":" not in found.group(2):
        return line
    text = found.group(2).replace("'", "''")
    return f"{found.group(1)}: '{text}'"


def _resources(folder: Path) -> tuple[dict[str, bytes], frozenset[str]]:
    """Every other file below the folder, and the paths that lead out of it, which are not read."""
    real, found, refused, size = folder.resolve(), {}, set(), 0
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names + [name for name in folders if Path(where, name).is_symlink()]):
            path = Path(where, name)
            inner = path.relative_to(folder).as_posix()
            if inner == SKILL_FILE:
                continue
            if not path.resolve().is_relative_to(real):
                refused.add(inner)
                continue
            fd = os.open(path.resolve(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    continue
                found[inner] = file.read(MAX_SKILLS_BYTES + 1)
            size += len(found[inner])
            if len(found) > MAX_FILES or size > MAX_SKILLS_BYTES:
                raise SkillError(
                    f"the skill {folder.name!r} has more than {MAX_FILES} files or {MAX_SKILLS_BYTES} bytes",
                    "io",
                    folder.name,
                    hint="Move what a model does not read elsewhere",
                )
    return found, frozenset(refused)

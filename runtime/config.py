"""AgentConfig: the one description of an agent, from Python or from a YAML file. Checked when it is made.

A config is a value: it opens nothing, and what was passed in is copied. How it is stored and sent is agents.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.compaction import SummaryCompactor
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.limits import Limits
from greenroom.runtime.middleware import Chain, checked_middleware
from greenroom.runtime.ports import Compactor, LlmProvider, ToolPolicy
from greenroom.runtime.providers import provider_from_string
from greenroom.runtime.rules import ToolPolicy as RuleSet
from greenroom.runtime.skills import SkillError, SkillManager
from greenroom.runtime.tools.read_skill import READ_SKILL, read_skill_tool
from greenroom.runtime.tools.registry import Tool, ToolRegistry
from greenroom.runtime.yaml_file import read_yaml

SANDBOX_KINDS = ("host", "bubblewrap")


@dataclass(frozen=True, slots=True)
class SubAgent:
    """An agent that another may start as a tool.

    agent: its config, or "self" for the agent that starts it. parallel: neighbouring spawns of one batch run together;
    they share the sandbox, so say it only where that is meant.
    """

    agent: AgentConfig | Literal["self"]
    description: str | None = None
    parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What an agent is. Required: name, provider. See api.md for every field.

    provider: a provider or "openai:MODEL", "scripted:FILE.yaml"; fallbacks: further ones, tried in order when one fails
    for good; sandbox: a kind, a SandboxSpec or None; subagents:
    tool name to SubAgent, a bare AgentConfig or "self". Raises ConfigError.
    """

    name: str
    provider: LlmProvider | str
    system_prompt: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    tools: ToolRegistry | Iterable[Tool] = ()
    subagents: Mapping[str, SubAgent | AgentConfig | Literal["self"]] = field(default_factory=dict)
    sandbox: SandboxSpec | str | None = None
    limits: Limits = field(default_factory=Limits)
    durability: Literal["effects", "step"] = "effects"
    capture_content: Literal["none"] = "none"
    fallbacks: Iterable[LlmProvider | str] = ()
    skills: Iterable[str | Path] | SkillManager = ()
    middleware: Iterable[Any] = ()
    policy: ToolPolicy | None = None
    compactor: Compactor | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("the agent has no name")
        if self.durability not in ("effects", "step"):
            raise ConfigError(f"agent {self.name!r}: durability is {self.durability!r}", hint="effects or step")
        if self.capture_content != "none":
            raise ConfigError(f"agent {self.name!r}: only capture_content='none' is available in this version")
        if not isinstance(self.limits, Limits):
            raise ConfigError(f"agent {self.name!r}: limits is no Limits(...)")
        if self.policy is not None and not hasattr(self.policy, "judge"):
            raise ConfigError(f"agent {self.name!r}: the policy {self.policy!r} has no `judge`", hint="See ToolPolicy")
        if self.compactor is not None and not isinstance(self.compactor, Compactor):
            raise ConfigError(f"agent {self.name!r}: the compactor has no `cut` and `summarize`", hint="See Compactor")
        self._set("provider", self._checked_provider(self.provider))
        self._set("fallbacks", tuple(map(self._checked_provider, self.fallbacks)))
        self._set("skills", self._checked_skills())
        self._set("tools", self._checked_tools())
        self._set("middleware", checked_middleware(self.middleware, self.name))
        self._set("sandbox", self._checked_sandbox())
        self._set("subagents", self._checked_subagents())

    def _checked_skills(self) -> SkillManager:
        if isinstance(self.skills, SkillManager):
            return self.skills
        try:
            return SkillManager.discover_dirs(self.skills)
        except SkillError as error:
            raise ConfigError(f"agent {self.name!r}: {error.message}", hint=error.hint) from error

    def _checked_tools(self) -> ToolRegistry:
        """The agent's tools, and readSkill where there are skills."""
        tools = ToolRegistry(tool for tool in self.tools if tool.builtin != READ_SKILL)
        if self.skill_manager:
            tools.add_tool(read_skill_tool(self.skill_manager))
        return tools

    # What the fields are once they have been checked; the constructor takes more.

    @property
    def llm(self) -> LlmProvider:
        assert not isinstance(self.provider, str)
        return self.provider

    @property
    def providers(self) -> tuple[LlmProvider, ...]:
        """The provider and its fallbacks, in the order they are tried."""
        others = [provider for provider in self.fallbacks if not isinstance(provider, str)]
        return (self.llm, *others)

    @cached_property
    def chain(self) -> Chain:
        """The agent's middleware as its runs call it."""
        return Chain(self.middleware)

    @property
    def skill_manager(self) -> SkillManager:
        assert isinstance(self.skills, SkillManager)
        return self.skills

    @property
    def instructions(self) -> str | None:
        """The system prompt with the index of skills."""
        return "\n\n".join(part for part in (self.system_prompt, self.skill_manager.index()) if part) or None

    @property
    def registry(self) -> ToolRegistry:
        assert isinstance(self.tools, ToolRegistry)
        return self.tools

    @property
    def sandbox_spec(self) -> SandboxSpec | None:
        assert not isinstance(self.sandbox, str)
        return self.sandbox

    def subagent(self, name: str) -> SubAgent:
        """What is behind a spawn tool."""
        found = self.subagents[name]
        assert isinstance(found, SubAgent)
        return found

    def child_agent(self, name: str) -> AgentConfig:
        """The agent that a spawn tool starts, "self" resolved."""
        agent = self.subagent(name).agent
        return agent if isinstance(agent, AgentConfig) else self

    @classmethod
    def load(cls, path: str | Path) -> AgentConfig:
        """An agent from a YAML file with the constructor's fields.

        `tools` is a list of "default" (the default tools; sandboxed unless the sandbox is host) and "module:attribute"
        (a ToolRegistry or a Tool); sub-agents are given inline or as the path of another file. Paths are relative to
        the file's folder. Raises ConfigError naming the file.
        """
        file = Path(path)
        document = read_yaml(file, "agent file")
        try:
            return cls.from_mapping(document, file.parent)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}", hint=error.hint) from error

    @classmethod
    def from_mapping(cls, document: Any, folder: Path) -> AgentConfig:
        """An agent from plain data, as `load` reads it."""
        if not isinstance(document, dict):
            raise ConfigError("the agent is no mapping", hint="Write fields, as in name: coder")
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(map(str, document)) - known)
        if unknown:
            raise ConfigError(f"unknown field {', '.join(unknown)}", hint=f"Fields are: {', '.join(sorted(known))}")
        for name in ("name", "provider"):
            if not isinstance(document.get(name), str):
                raise ConfigError(f"the field {name!r} is missing or no text")
        fields = dict(document)
        fields["provider"] = provider_from_string(document["provider"], str(folder))
        try:
            if "limits" in fields:
                fields["limits"] = Limits.model_validate(fields["limits"])
            if isinstance(fields.get("compactor"), str):
                fields["compactor"] = load_attribute(fields["compactor"])
            elif fields.get("compactor") is not None:
                fields["compactor"] = SummaryCompactor.model_validate(fields["compactor"])
            if isinstance(fields.get("sandbox"), dict):
                fields["sandbox"] = _spec_from_mapping(fields["sandbox"], folder)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where}: {first['msg']} (got {first['input']!r})") from None
        if "tools" in fields:
            sandbox = fields.get("sandbox")
            host = sandbox == "host" or (isinstance(sandbox, SandboxSpec) and sandbox.kind == "host")
            fields["tools"] = _tools_from_list(fields["tools"], host=host)
        if "skills" in fields:
            if not isinstance(fields["skills"], list):
                raise ConfigError("skills is no list", hint="Write the folders, as in - ./skills")
            fields["skills"] = [folder / os.path.expanduser(str(path)) for path in fields["skills"]]
        if "middleware" in fields:
            fields["middleware"] = _middleware_from(fields["middleware"])
        if "policy" in fields:
            fields["policy"] = _policy_from(fields["policy"], folder)
        if "subagents" in fields:
            fields["subagents"] = _subagents_from_mapping(fields["subagents"], folder)
        return cls(**fields)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_provider(self, given: LlmProvider | str) -> LlmProvider:
        provider = provider_from_string(given) if isinstance(given, str) else given
        if not callable(getattr(provider, "stream", None)):
            raise ConfigError(
                f"agent {self.name!r}: {type(provider).__name__} is no provider",
                hint='Pass OpenAICompatible(...), Scripted([...]) or a text such as "openai:gpt-5"',
            )
        return provider

    def _checked_sandbox(self) -> SandboxSpec | None:
        spec = SandboxSpec(kind=self.sandbox) if isinstance(self.sandbox, str) else self.sandbox
        if spec is not None and spec.kind not in SANDBOX_KINDS:
            raise ConfigError(
                f"agent {self.name!r}: there is no sandbox {spec.kind!r}", hint=f"One of {', '.join(SANDBOX_KINDS)}"
            )
        return spec

    def _checked_subagents(self) -> dict[str, SubAgent]:
        checked = {}
        for name, value in self.subagents.items():
            if name in self.registry:
                raise ConfigError(f"agent {self.name!r}: {name!r} is both a tool and a sub-agent", hint="Rename one")
            checked[name] = value if isinstance(value, SubAgent) else SubAgent(value)
            if not isinstance(checked[name].agent, AgentConfig) and checked[name].agent != "self":
                raise ConfigError(f"agent {self.name!r}: sub-agent {name!r} is neither an AgentConfig nor 'self'")
        return checked


def _spec_from_mapping(document: dict[str, Any], folder: Path) -> SandboxSpec:
    spec = SandboxSpec.model_validate(document)
    if spec.workspace is None:
        return spec
    return spec.but(workspace=str((folder / os.path.expanduser(spec.workspace)).resolve()))


def _tools_from_list(entries: Any, *, host: bool) -> list[Tool]:
    from greenroom.runtime.tools.builtin import default_tools

    if not isinstance(entries, list):
        raise ConfigError("tools is no list", hint='Write entries such as "default" or "module:attribute"')
    tools: list[Tool] = []
    for entry in entries:
        if entry == "default":
            tools += default_tools("host" if host else "sandboxed")
            continue
        found = load_attribute(str(entry))
        if isinstance(found, ToolRegistry):
            tools += found
        elif isinstance(found, Tool):
            tools.append(found)
        elif callable(found):
            registry = ToolRegistry()
            registry.tool(found)
            tools += registry
        else:
            raise ConfigError(f"{entry} is a {type(found).__name__}", hint="Name a ToolRegistry, a Tool or a function")
    return tools


def _middleware_from(entries: Any) -> list[Any]:
    """What `module:attribute` names: an object, or a class to make one of."""
    if not isinstance(entries, list):
        raise ConfigError("middleware is no list", hint="Write entries such as - module:attribute")
    found = [load_attribute(str(entry)) for entry in entries]
    return [entry() if isinstance(entry, type) else entry for entry in found]


def _policy_from(entry: Any, folder: Path) -> ToolPolicy | None:
    """Rules as they stand, the path of a YAML file with them, or module:attribute of a policy."""
    if entry is None or isinstance(entry, list):
        return None if entry is None else RuleSet.rules(entry)
    if isinstance(entry, str) and entry.endswith((".yaml", ".yml")):
        return RuleSet.rules(folder / entry)
    if isinstance(entry, str):
        found: ToolPolicy = load_attribute(entry)
        return found
    raise ConfigError("policy is neither rules nor a name", hint="Give a list of rules, a file, or module:attribute")


def _subagents_from_mapping(document: Any, folder: Path) -> dict[str, SubAgent]:
    if not isinstance(document, dict):
        raise ConfigError("subagents is no mapping", hint="Write TOOL_NAME: {agent: FILE}")
    made = {}
    for name, value in document.items():
        entry = value if isinstance(value, dict) else {"agent": value}
        unknown = sorted(set(entry) - {"agent", "description", "parallel"})
        if unknown:
            raise ConfigError(f"sub-agent {name!r}: unknown field {', '.join(unknown)}")
        agent = entry.get("agent")
        if isinstance(agent, dict):
            agent = AgentConfig.from_mapping(agent, folder)
        elif isinstance(agent, str) and agent != "self":
            agent = AgentConfig.load(folder / agent)
        elif agent != "self":
            raise ConfigError(f"sub-agent {name!r} has no agent", hint="Give a file, fields, or self")
        made[str(name)] = SubAgent(agent, entry.get("description"), bool(entry.get("parallel", False)))
    return made


def load_attribute(reference: str) -> Any:
    """What `module:attribute` names; raises ConfigError saying which half is missing."""
    module_name, separator, attribute = reference.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{reference!r} is no reference", hint="Write module:attribute")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"the module {module_name!r} cannot be imported: {error}", hint="See where you call from"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(f"the module {module_name!r} has no {attribute!r}")
    return found

"""Policies as data: rules in order, the first that fits a call decides; a call that none fits may run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from greenroom.runtime import ports
from greenroom.runtime.calls import ProposedCall, Verdict, compact_json
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.yaml_file import read_yaml


class ToolPolicy(ports.ToolPolicy):
    """Decides which calls may run: a class of one's own with `judge`, or rules."""

    @staticmethod
    def rules(rules: Iterable[Mapping[str, Any]] | str | Path) -> RulesPolicy:
        """A policy from rules, or from a YAML file with a list of them; raises ConfigError naming the rule.

            {"tool": "bash", "arguments": {"command": "rm *"}, "verdict": "deny", "reason": "nothing is removed here"}

        tool: a name; arguments: by name, with dots into objects; both are patterns as of a shell: `*` anything, `?` one
        character, `[ab]` one of these, case counts. A text is matched as it is, anything else as its JSON; an argument
        that the call does not have fits no pattern. verdict: allow, deny or ask; reason: told with it.

        A pattern reads text, it does not understand a command: `rm *` does not fit `cd / && rm -rf .`. To be sure,
        allow what is wanted and end with {"tool": "*", "verdict": "ask"}.
        """
        if isinstance(rules, str | Path):
            rules = _from_file(Path(rules))
        return RulesPolicy(rules=tuple(_rule(number, rule) for number, rule in enumerate(rules, start=1)))


class Rule(BaseModel):
    """See ToolPolicy.rules."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tool: str
    verdict: Literal["allow", "deny", "ask"]
    arguments: dict[str, str] = {}
    reason: str = ""

    def fits(self, call: ProposedCall) -> bool:
        if not fnmatchcase(call.tool, self.tool):
            return False
        return all(_fits(pattern, _argument(call.arguments, name)) for name, pattern in self.arguments.items())


class RulesPolicy(BaseModel):
    """The policy of these rules; plain data, so that it is stored with its agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: tuple[Rule, ...]

    async def judge(self, session_id: str, calls: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        return [self.verdict(call) for call in calls]

    def verdict(self, call: ProposedCall) -> Verdict:
        for rule in self.rules:
            if rule.fits(call):
                return Verdict(rule.verdict, rule.reason)
        return Verdict("allow")


_MISSING = object()


def _argument(arguments: Mapping[str, Any], name: str) -> Any:
    """The argument, by its name or by a way into objects."""
    if name in arguments:
        return arguments[name]
    found: Any = arguments
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _fits(pattern: str, value: Any) -> bool:
    if value is _MISSING:
        return False
    return fnmatchcase(value if isinstance(value, str) else compact_json(value), pattern)


def _rule(number: int, rule: Any) -> Rule:
    try:
        return rule if isinstance(rule, Rule) else Rule.model_validate(dict(rule))
    except (ValidationError, TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            said = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        else:
            said = f"{rule!r} is no mapping"
        raise ConfigError(
            f"rule {number} of the policy: {said}",
            hint='A rule is {"tool": PATTERN, "arguments": {NAME: PATTERN}, "verdict": allow | deny | ask}',
        ) from None


def _from_file(path: Path) -> list[Any]:
    found = read_yaml(path, "policy")
    if not isinstance(found, list):
        raise ConfigError(f"the policy {path} is no list", hint="Write one rule per item, as in - {tool: bash, ...}")
    return found

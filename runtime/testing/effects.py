"""What has really happened outside, as the crash harness keeps it: it is compared with what the histories say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from pydantic_core import to_jsonable_python

from greenroom.runtime.calls import compact_json


@dataclasses.dataclass(slots=True)
class Effects:
    """What has really happened: per (tool, arguments) how often it began, and what it gave when it ended.

    asked: of those, the ones that asked someone instead of giving a result.
    """

    began: Counter[str] = dataclasses.field(default_factory=Counter)
    asked: set[str] = dataclasses.field(default_factory=set)
    outputs: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def begin(self, tool: str, arguments: Any) -> str:
        key = effect_key(tool, arguments)
        self.began[key] += 1
        return key

    def end(self, key: str, output: str) -> None:
        self.outputs.setdefault(key, []).append(output)


def effect_key(tool: str, arguments: Any) -> str:
    return compact_json([tool, to_jsonable_python(arguments)])

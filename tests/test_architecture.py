"""docs/architecture.md against the tree: every module is on the map once, every name of a walk exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FOLDERS = ("runtime", "actors", "sandbox")


def _modules() -> set[str]:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "src" / "greenroom").glob("*.py")}
    for folder in FOLDERS:
        paths = (path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py")
        found |= {str(path.relative_to(ROOT)) for path in paths}
    return found


def _names(module: str) -> set[str]:
    """Functions and classes of a module, methods and what a class assigns to itself as Class.name."""
    found = set()
    for node in ast.parse((ROOT / module).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            found |= {
                f"{node.name}.{inner.attr}"
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            }
    return found


def test_every_module_is_on_the_map_once() -> None:
    on_map = Counter(re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, flags=re.MULTILINE))
    assert set(on_map) == _modules()
    assert set(on_map.values()) == {1}


def test_every_name_that_a_walk_goes_through_exists() -> None:
    walks = PAGE[PAGE.index("## Walk 1") :]
    steps = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", walks)
    assert len(steps) > 40
    assert [(module, name) for module, name in steps if name not in _names(module)] == []
    everywhere = set().union(*(_names(module) for module in _modules()))
    bare = re.findall(r"`([A-Z]\w+\.\w+)`", walks)
    assert [name for name in bare if name not in everywhere] == []

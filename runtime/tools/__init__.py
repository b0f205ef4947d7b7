"""Tools: the registry, schemas and validation, and the built-in ones."""

from greenroom.runtime.tools.builtin import register_default_tools
from greenroom.runtime.tools.registry import Tool, ToolRegistry, ToolSpec

__all__ = ["Tool", "ToolRegistry", "ToolSpec", "register_default_tools"]

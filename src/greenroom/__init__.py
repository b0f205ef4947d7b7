"""Greenroom: a durable agent runtime for Python on Ray.

The public names, imported when they are first used (PEP 562): `import greenroom` loads neither Ray nor any client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.actors.client import connect as connect
    from greenroom.actors.wire import PoolConfig as PoolConfig
    from greenroom.embedded import AgentRuntime as AgentRuntime
    from greenroom.runtime.calls import ExecResult as ExecResult
    from greenroom.runtime.calls import Interrupt as Interrupt
    from greenroom.runtime.calls import JobState as JobState
    from greenroom.runtime.calls import ModelRequest as ModelRequest
    from greenroom.runtime.calls import ProposedCall as ProposedCall
    from greenroom.runtime.calls import SandboxLimits as SandboxLimits
    from greenroom.runtime.calls import SandboxSpec as SandboxSpec
    from greenroom.runtime.calls import ToolContext as ToolContext
    from greenroom.runtime.calls import ToolOutput as ToolOutput
    from greenroom.runtime.calls import Verdict as Verdict
    from greenroom.runtime.cancel import CancelToken as CancelToken
    from greenroom.runtime.compaction import SummaryCompactor as SummaryCompactor
    from greenroom.runtime.config import AgentConfig as AgentConfig
    from greenroom.runtime.config import SubAgent as SubAgent
    from greenroom.runtime.errors import AgentUnavailable as AgentUnavailable
    from greenroom.runtime.errors import AlreadyExists as AlreadyExists
    from greenroom.runtime.errors import ClaimHeld as ClaimHeld
    from greenroom.runtime.errors import ClusterError as ClusterError
    from greenroom.runtime.errors import ConfigError as ConfigError
    from greenroom.runtime.errors import Conflict as Conflict
    from greenroom.runtime.errors import Deleted as Deleted
    from greenroom.runtime.errors import EditRefused as EditRefused
    from greenroom.runtime.errors import Fenced as Fenced
    from greenroom.runtime.errors import GreenroomError as GreenroomError
    from greenroom.runtime.errors import IllegalTransition as IllegalTransition
    from greenroom.runtime.errors import InterruptPending as InterruptPending
    from greenroom.runtime.errors import JobNotFound as JobNotFound
    from greenroom.runtime.errors import NewerSchema as NewerSchema
    from greenroom.runtime.errors import NotFound as NotFound
    from greenroom.runtime.errors import PathRefused as PathRefused
    from greenroom.runtime.errors import PoolMismatch as PoolMismatch
    from greenroom.runtime.errors import PreconditionFailed as PreconditionFailed
    from greenroom.runtime.errors import PreflightError as PreflightError
    from greenroom.runtime.errors import ProviderError as ProviderError
    from greenroom.runtime.errors import RequestConflict as RequestConflict
    from greenroom.runtime.errors import RunFailed as RunFailed
    from greenroom.runtime.errors import SandboxConflict as SandboxConflict
    from greenroom.runtime.errors import SandboxDied as SandboxDied
    from greenroom.runtime.errors import SandboxError as SandboxError
    from greenroom.runtime.errors import SandboxFenced as SandboxFenced
    from greenroom.runtime.errors import SandboxUnavailable as SandboxUnavailable
    from greenroom.runtime.errors import SessionBusy as SessionBusy
    from greenroom.runtime.errors import SessionError as SessionError
    from greenroom.runtime.errors import SessionExists as SessionExists
    from greenroom.runtime.errors import SessionNotFound as SessionNotFound
    from greenroom.runtime.errors import StorageError as StorageError
    from greenroom.runtime.errors import Undecided as Undecided
    from greenroom.runtime.errors import UnknownInterrupt as UnknownInterrupt
    from greenroom.runtime.errors import UsageError as UsageError
    from greenroom.runtime.events import Event as Event
    from greenroom.runtime.limits import Limits as Limits
    from greenroom.runtime.messages import ImageBlock as ImageBlock
    from greenroom.runtime.messages import Message as Message
    from greenroom.runtime.messages import MessageDelta as MessageDelta
    from greenroom.runtime.messages import ReasoningBlock as ReasoningBlock
    from greenroom.runtime.messages import RedactedThinkingBlock as RedactedThinkingBlock
    from greenroom.runtime.messages import TextBlock as TextBlock
    from greenroom.runtime.messages import TextDelta as TextDelta
    from greenroom.runtime.messages import ThinkingBlock as ThinkingBlock
    from greenroom.runtime.messages import ThinkingDelta as ThinkingDelta
    from greenroom.runtime.messages import ToolCallBlock as ToolCallBlock
    from greenroom.runtime.messages import ToolCallDelta as ToolCallDelta
    from greenroom.runtime.messages import ToolResultBlock as ToolResultBlock
    from greenroom.runtime.messages import Usage as Usage
    from greenroom.runtime.ports import Compactor as Compactor
    from greenroom.runtime.ports import HookContext as HookContext
    from greenroom.runtime.ports import Middleware as Middleware
    from greenroom.runtime.protocols import Runtime as Runtime
    from greenroom.runtime.protocols import Session as Session
    from greenroom.runtime.providers import Anthropic as Anthropic
    from greenroom.runtime.providers import OpenAICompatible as OpenAICompatible
    from greenroom.runtime.providers import Scripted as Scripted
    from greenroom.runtime.results import Failure as Failure
    from greenroom.runtime.results import FailureKind as FailureKind
    from greenroom.runtime.results import MapResult as MapResult
    from greenroom.runtime.results import PendingCall as PendingCall
    from greenroom.runtime.results import RunResult as RunResult
    from greenroom.runtime.results import RunStatus as RunStatus
    from greenroom.runtime.results import SessionInfo as SessionInfo
    from greenroom.runtime.results import SessionTree as SessionTree
    from greenroom.runtime.results import Transcript as Transcript
    from greenroom.runtime.results import Turn as Turn
    from greenroom.runtime.rules import ToolPolicy as ToolPolicy
    from greenroom.runtime.skills import SkillError as SkillError
    from greenroom.runtime.skills import SkillManager as SkillManager
    from greenroom.runtime.storage import Storage as Storage
    from greenroom.runtime.tools import Tool as Tool
    from greenroom.runtime.tools import ToolRegistry as ToolRegistry
    from greenroom.runtime.tools import ToolSpec as ToolSpec
    from greenroom.runtime.tools import register_default_tools as register_default_tools
    from greenroom.runtime.tools.system import lookup_builtin_tool as lookup_builtin_tool
    from greenroom.sandbox.reading import rooted_read_tool as rooted_read_tool

__version__ = "0.1.0"

_HOME = {
    "AgentConfig": "runtime.config",
    "AgentRuntime": "embedded",
    "AgentUnavailable": "runtime.errors",
    "AlreadyExists": "runtime.errors",
    "Anthropic": "runtime.providers",
    "CancelToken": "runtime.cancel",
    "ClaimHeld": "runtime.errors",
    "ClusterError": "runtime.errors",
    "ConfigError": "runtime.errors",
    "Conflict": "runtime.errors",
    "Deleted": "runtime.errors",
    "Event": "runtime.events",
    "ExecResult": "runtime.calls",
    "Failure": "runtime.results",
    "FailureKind": "runtime.results",
    "Fenced": "runtime.errors",
    "GreenroomError": "runtime.errors",
    "IllegalTransition": "runtime.errors",
    "ImageBlock": "runtime.messages",
    "Compactor": "runtime.ports",
    "HookContext": "runtime.ports",
    "Interrupt": "runtime.calls",
    "JobState": "runtime.calls",
    "InterruptPending": "runtime.errors",
    "Limits": "runtime.limits",
    "MapResult": "runtime.results",
    "Message": "runtime.messages",
    "MessageDelta": "runtime.messages",
    "Middleware": "runtime.ports",
    "ModelRequest": "runtime.calls",
    "NewerSchema": "runtime.errors",
    "NotFound": "runtime.errors",
    "OpenAICompatible": "runtime.providers",
    "EditRefused": "runtime.errors",
    "JobNotFound": "runtime.errors",
    "PathRefused": "runtime.errors",
    "PendingCall": "runtime.results",
    "PoolConfig": "actors.wire",
    "PoolMismatch": "runtime.errors",
    "PreconditionFailed": "runtime.errors",
    "PreflightError": "runtime.errors",
    "ProposedCall": "runtime.calls",
    "ProviderError": "runtime.errors",
    "ReasoningBlock": "runtime.messages",
    "RedactedThinkingBlock": "runtime.messages",
    "RequestConflict": "runtime.errors",
    "RunFailed": "runtime.errors",
    "RunResult": "runtime.results",
    "RunStatus": "runtime.results",
    "Runtime": "runtime.protocols",
    "SandboxConflict": "runtime.errors",
    "SandboxDied": "runtime.errors",
    "SandboxError": "runtime.errors",
    "SandboxFenced": "runtime.errors",
    "SandboxLimits": "runtime.calls",
    "SandboxSpec": "runtime.calls",
    "SandboxUnavailable": "runtime.errors",
    "Scripted": "runtime.providers",
    "Session": "runtime.protocols",
    "SessionBusy": "runtime.errors",
    "SessionError": "runtime.errors",
    "SessionExists": "runtime.errors",
    "SessionInfo": "runtime.results",
    "SessionTree": "runtime.results",
    "SessionNotFound": "runtime.errors",
    "Storage": "runtime.storage",
    "StorageError": "runtime.errors",
    "SubAgent": "runtime.config",
    "TextBlock": "runtime.messages",
    "TextDelta": "runtime.messages",
    "ThinkingBlock": "runtime.messages",
    "ThinkingDelta": "runtime.messages",
    "Tool": "runtime.tools",
    "ToolCallBlock": "runtime.messages",
    "ToolCallDelta": "runtime.messages",
    "ToolContext": "runtime.calls",
    "ToolOutput": "runtime.calls",
    "ToolPolicy": "runtime.rules",
    "SkillError": "runtime.skills",
    "SummaryCompactor": "runtime.compaction",
    "SkillManager": "runtime.skills",
    "ToolRegistry": "runtime.tools",
    "ToolResultBlock": "runtime.messages",
    "ToolSpec": "runtime.tools",
    "Transcript": "runtime.results",
    "Turn": "runtime.results",
    "Undecided": "runtime.errors",
    "UnknownInterrupt": "runtime.errors",
    "Usage": "runtime.messages",
    "UsageError": "runtime.errors",
    "Verdict": "runtime.calls",
    "connect": "actors.client",
    "register_default_tools": "runtime.tools",
    "lookup_builtin_tool": "runtime.tools.system",
    "rooted_read_tool": "sandbox.reading",
}

__all__ = [
    "AgentConfig",
    "AgentRuntime",
    "AgentUnavailable",
    "AlreadyExists",
    "Anthropic",
    "CancelToken",
    "ClaimHeld",
    "ClusterError",
    "Compactor",
    "ConfigError",
    "Conflict",
    "Deleted",
    "EditRefused",
    "Event",
    "ExecResult",
    "Failure",
    "FailureKind",
    "Fenced",
    "GreenroomError",
    "HookContext",
    "IllegalTransition",
    "ImageBlock",
    "Interrupt",
    "InterruptPending",
    "JobNotFound",
    "JobState",
    "Limits",
    "MapResult",
    "Message",
    "MessageDelta",
    "Middleware",
    "ModelRequest",
    "NewerSchema",
    "NotFound",
    "OpenAICompatible",
    "PathRefused",
    "PendingCall",
    "PoolConfig",
    "PoolMismatch",
    "PreconditionFailed",
    "PreflightError",
    "ProposedCall",
    "ProviderError",
    "ReasoningBlock",
    "RedactedThinkingBlock",
    "RequestConflict",
    "RunFailed",
    "RunResult",
    "RunStatus",
    "Runtime",
    "SandboxConflict",
    "SandboxDied",
    "SandboxError",
    "SandboxFenced",
    "SandboxLimits",
    "SandboxSpec",
    "SandboxUnavailable",
    "Scripted",
    "Session",
    "SessionBusy",
    "SessionError",
    "SessionExists",
    "SessionInfo",
    "SessionNotFound",
    "SessionTree",
    "SkillError",
    "SkillManager",
    "Storage",
    "StorageError",
    "SubAgent",
    "SummaryCompactor",
    "TextBlock",
    "TextDelta",
    "ThinkingBlock",
    "ThinkingDelta",
    "Tool",
    "ToolCallBlock",
    "ToolCallDelta",
    "ToolContext",
    "ToolOutput",
    "ToolPolicy",
    "ToolRegistry",
    "ToolResultBlock",
    "ToolSpec",
    "Transcript",
    "Turn",
    "Undecided",
    "UnknownInterrupt",
    "Usage",
    "UsageError",
    "Verdict",
    "connect",
    "lookup_builtin_tool",
    "register_default_tools",
    "rooted_read_tool",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

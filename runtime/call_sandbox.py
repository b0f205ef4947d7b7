"""CallSandbox: the tree's sandbox as one call's tool sees it (ctx.sandbox)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from greenroom.runtime.calls import CallRef, ExecResult, JobState
from greenroom.runtime.editing import Edit, Edited
from greenroom.runtime.errors import JobNotFound
from greenroom.runtime.operations import (
    CheckJob,
    EditFile,
    Execute,
    KillJob,
    ListDir,
    Operation,
    OperationResult,
    ReadFile,
    StartJob,
    WriteFile,
    is_exempt,
    is_read,
)
from greenroom.runtime.ports import TreeSandbox


class CallSandbox:
    """BoundSandbox for one call: the first operation goes under the call's own key, later ones under key#1, key#2, …

    open: answers the tree's sandbox, at the first use; timeout: seconds that a command gets unless the tool says
    otherwise, its partial output is kept; yield_after: seconds until a command that `start` began goes to the
    background, None for never; cwd: where its commands begin, None for the workspace; a command that ends elsewhere
    changes it. `changed`: key of the last operation that may have changed the workspace; `jobs`: what became of the
    background jobs that this call saw, by id: whether they run.
    """

    def __init__(
        self,
        open: Callable[[], Awaitable[TreeSandbox]],
        ref: CallRef,
        timeout: float | None,
        yield_after: float | None = None,
        cwd: str | None = None,
    ) -> None:
        self.cwd = cwd
        self.changed: str | None = None
        self.jobs: dict[str, bool] = {}
        self._open = open
        self._ref = ref
        self._timeout = timeout
        self._yield_after = yield_after
        self._count = 0

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult:
        result = await self._perform(Execute(command, self._timeout if timeout is None else timeout, self.cwd))
        assert isinstance(result, ExecResult)
        return self._ended(result)

    async def start(self, command: str) -> ExecResult | JobState:
        if self._yield_after is None:
            return await self.execute(command)
        result = await self._perform(StartJob(command, self._yield_after, self._timeout, self.cwd))
        if isinstance(result, JobState):
            return self._noted(result)
        assert isinstance(result, ExecResult)
        return self._ended(result)

    async def check_job(self, id: str, wait: float | None = None) -> JobState:
        return await self._look_after(CheckJob(id, wait))

    async def kill_job(self, id: str) -> JobState:
        return await self._look_after(KillJob(id))

    async def _look_after(self, operation: CheckJob | KillJob) -> JobState:
        try:
            result = await self._perform(operation)
        except JobNotFound:
            self.jobs[operation.id] = False
            raise
        assert isinstance(result, JobState)
        return self._noted(result)

    def _ended(self, result: ExecResult) -> ExecResult:
        self.cwd = result.cwd or self.cwd
        return result

    def _noted(self, result: JobState) -> JobState:
        self.jobs[result.id] = result.status == "running"
        return result

    async def read_file(self, path: str) -> bytes:
        result = await self._perform(ReadFile(path))
        assert isinstance(result, bytes)
        return result

    async def write_file(self, path: str, data: bytes) -> None:
        await self._perform(WriteFile(path, data))

    async def edit_file(self, path: str, edit: Edit) -> Edited:
        result = await self._perform(EditFile(path, edit))
        assert isinstance(result, Edited)
        return result

    async def list_dir(self, path: str) -> tuple[str, ...]:
        result = await self._perform(ListDir(path))
        assert isinstance(result, tuple)
        return result

    async def _perform(self, operation: Operation) -> OperationResult:
        number, self._count = self._count, self._count + 1
        ref = self._ref if number == 0 else self._ref.later(number)
        if not is_read(operation) and not is_exempt(operation):
            self.changed = ref.call_key
        return await (await self._open()).perform(ref, operation)

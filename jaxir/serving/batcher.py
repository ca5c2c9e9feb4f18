"""Batches concurrent jobs: the jobs that wait during one batch form the next.

Nothing waits for a batch to fill, so a single client has no delay; more clients make larger batches.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from jaxir.core.errors import UserError

J = TypeVar("J")
R = TypeVar("R")


class Busy(Exception):
    """Raised when too many jobs are waiting."""


class Batcher(Generic[J, R]):
    """Runs jobs in batches on its own thread; use it as an async context manager."""

    def __init__(
        self, work: Callable[[list[J]], Sequence[R]], *, max_batch: int, max_waiting: int, name: str
    ):
        self._work, self._max_batch, self._max_waiting, self._name = work, max_batch, max_waiting, name
        self._waiting: collections.deque[tuple[J, asyncio.Future[R]]] = collections.deque()
        self._arrival = asyncio.Event()
        self.sizes: collections.Counter[int] = collections.Counter()  # batch size -> number of batches
        self.busy_seconds = 0.0  # seconds that the thread spent on batches

    @property
    def waiting(self) -> int:
        """The number of waiting jobs."""
        return len(self._waiting)

    async def __aenter__(self) -> Batcher[J, R]:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for _, future in self._waiting:
            future.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    async def results(self, jobs: Sequence[J]) -> list[R]:
        """Returns the results of `jobs`; raises `Busy` or an error of `work`."""
        if len(self._waiting) + len(jobs) > self._max_waiting:
            raise Busy(f"the service is busy: {len(self._waiting):,} texts are already waiting")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in jobs]
        self._waiting.extend(zip(jobs, futures, strict=True))
        self._arrival.set()
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrival.wait()
            batch = self._take()
            if not batch:
                self._arrival.clear()
                continue
            started = time.perf_counter()
            outcomes = await loop.run_in_executor(self._thread, self._attempt, [job for job, _ in batch])
            self.sizes[len(batch)] += 1
            self.busy_seconds += time.perf_counter() - started
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _take(self) -> list[tuple[J, asyncio.Future[R]]]:
        batch = []
        while self._waiting and len(batch) < self._max_batch:
            job, future = self._waiting.popleft()
            if not future.done():
                batch.append((job, future))
        return batch

    def _attempt(self, jobs: list[J]) -> Sequence[R | Exception]:
        """Returns a result or an exception for each job. If the batch fails, runs its jobs one by one."""
        try:
            return self._work(jobs)
        except Exception as error:
            if len(jobs) == 1:
                return [error]
            if isinstance(error, UserError):
                return [error] * len(jobs)  # the fault is the machine's or a setting's, so all jobs fail
            return [self._attempt([job])[0] for job in jobs]

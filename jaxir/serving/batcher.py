"""Batches concurrent jobs: the jobs that wait during one batch form the next.

Nothing waits for a batch to fill, so a single client has no delay and needs no deadline; more clients make
larger batches.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from jaxir.core.errors import UserError

J = TypeVar("J")
R = TypeVar("R")


class Busy(Exception):
    """Raised when too many jobs are waiting."""


class Batcher(Generic[J, R]):
    """Runs jobs in batches on its own threads; use it as an async context manager.

    Args:
      work: returns the result of each job of a batch.
      max_batch: maximum number of jobs in a batch.
      max_waiting: maximum number of waiting jobs.
      name: prefix of the threads' names.
      read: prepares the jobs of a request, on another thread, before they wait; `work` gets what it returns.
      choose: returns the positions of the next batch, given the waiting jobs, the oldest first, and the
        number of idle threads. The oldest must be among them. None: the oldest `max_batch`.
      threads: number of threads that run batches.
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Sequence[R]],
        *,
        max_batch: int,
        max_waiting: int,
        name: str,
        read: Callable[[Sequence[J]], Sequence[Any]] | None = None,
        choose: Callable[[Sequence[Any], int], Sequence[int]] | None = None,
        threads: int = 1,
    ):
        self._work, self._max_batch, self._max_waiting, self._name = work, max_batch, max_waiting, name
        self._read, self._choose, self._threads = read, choose, threads
        self._waiting: list[tuple[Any, asyncio.Future[R]]] = []
        self._reading = 0  # number of jobs that are being read
        self._idle = threads  # number of threads without a batch
        self._arrival = asyncio.Event()
        self.sizes: collections.Counter[int] = collections.Counter()  # batch size -> number of batches
        self.busy_seconds = 0.0  # seconds that the threads spent on batches, on average

    @property
    def waiting(self) -> int:
        """The number of waiting jobs."""
        return len(self._waiting) + self._reading

    async def __aenter__(self) -> Batcher[J, R]:
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-reader")
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._threads)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()
        for pool in (self._readers, self._pool):
            await asyncio.to_thread(pool.shutdown)

    async def results(self, jobs: Sequence[J]) -> list[R]:
        """Returns the results of `jobs`; raises `Busy` or an error of `read` or `work`."""
        if self.waiting + len(jobs) > self._max_waiting:
            raise Busy(f"the service is busy: {self.waiting:,} texts are already waiting")
        loop = asyncio.get_running_loop()
        if self._read is not None:
            self._reading += len(jobs)
            try:
                jobs = await loop.run_in_executor(self._readers, self._read, jobs)
            finally:
                self._reading -= len(jobs)
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
            self._idle -= 1
            outcomes = await loop.run_in_executor(self._pool, self._attempt, [job for job, _ in batch])
            self._idle += 1
            self.sizes[len(batch)] += 1
            self.busy_seconds += (time.perf_counter() - started) / self._threads
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _take(self) -> list[tuple[Any, asyncio.Future[R]]]:
        self._waiting = [(job, future) for job, future in self._waiting if not future.done()]
        chosen: Sequence[int] = range(len(self._waiting))
        if self._choose is not None and self._waiting:
            chosen = self._choose([job for job, _ in self._waiting], self._idle)
        chosen = chosen[: self._max_batch]
        batch, taken = [self._waiting[n] for n in chosen], set(chosen)
        self._waiting = [each for n, each in enumerate(self._waiting) if n not in taken]
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

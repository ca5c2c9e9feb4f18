import asyncio
import threading

import pytest

from jaxir.core.errors import UserError
from jaxir.serving.batcher import Batcher, Busy


class Recorder:
    """Work that records its batches and blocks until `go` is set."""

    def __init__(self):
        self.batches, self.go, self.begun = [], threading.Event(), threading.Event()

    def __call__(self, jobs: list[int]) -> list[int]:
        self.batches.append(list(jobs))
        self.begun.set()
        assert self.go.wait(20)
        if -1 in jobs:
            raise ValueError("a bad job")
        if -2 in jobs:
            raise UserError("a bad machine")
        return [job * 10 for job in jobs]


def run(scenario, *, max_batch=4, max_waiting=100, **how):
    async def inside():
        work = Recorder()
        async with Batcher(work, max_batch=max_batch, max_waiting=max_waiting, name="test", **how) as batcher:
            try:
                await scenario(batcher, work)
            finally:
                work.go.set()

    asyncio.run(inside())


async def under_way(batcher, work, job: int = 0) -> asyncio.Task:
    """Returns the task of a job that has begun, so that others wait."""
    task = asyncio.create_task(batcher.results([job]))
    await asyncio.to_thread(work.begun.wait, 20)
    return task


def test_waiting_requests_share_a_batch_in_order():
    async def scenario(batcher, work):
        first = await under_way(batcher, work)
        others = [asyncio.create_task(batcher.results([i])) for i in range(1, 4)]
        several = asyncio.create_task(batcher.results([4, 5, 6]))
        await asyncio.sleep(0)
        work.go.set()
        assert await first == [0]
        assert [await task for task in others] == [[10], [20], [30]]
        assert await several == [40, 50, 60]
        assert work.batches == [[0], [1, 2, 3, 4], [5, 6]]

    run(scenario)


@pytest.mark.parametrize(("bad", "others_fail"), [(-1, False), (-2, True)])
def test_bad_job_fails_alone_but_machine_error_fails_all(bad, others_fail):
    async def scenario(batcher, work):
        await under_way(batcher, work)
        tasks = [asyncio.create_task(batcher.results([job])) for job in (1, bad, 2)]
        await asyncio.sleep(0)
        work.go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[1], UserError if others_fail else ValueError)
        if others_fail:
            assert work.batches == [[0], [1, -2, 2]]
            assert all(isinstance(outcome, UserError) for outcome in outcomes)
        else:
            assert outcomes[0] == [10] and outcomes[2] == [20]

    run(scenario)


def test_jobs_of_a_cancelled_caller_are_dropped():
    async def scenario(batcher, work):
        first = await under_way(batcher, work)
        gone = asyncio.create_task(batcher.results([1, 2]))
        stays = asyncio.create_task(batcher.results([3]))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        work.go.set()
        assert await stays == [30] and await first == [0]
        assert work.batches == [[0], [3]]

    run(scenario)


def test_too_many_waiting_jobs_are_refused_at_once():
    async def scenario(batcher, work):
        first = await under_way(batcher, work)
        waiting = asyncio.create_task(batcher.results([1, 2]))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="2 texts are already waiting"):
            await batcher.results([3, 4])
        work.go.set()
        assert await waiting == [10, 20] and await first == [0]
        assert await batcher.results([5, 6, 7]) == [50, 60, 70]

    run(scenario, max_waiting=3)


def test_batch_has_the_chosen_jobs_and_others_keep_their_order():
    async def scenario(batcher, work):
        first = await under_way(batcher, work)
        others = asyncio.create_task(batcher.results([1, 2, 3, 4, 5]))
        await asyncio.sleep(0)
        work.go.set()
        assert await first == [0] and await others == [10, 20, 30, 40, 50]
        assert work.batches == [[0], [1, 3], [2, 5], [4]]

    def choose(waiting: list[int], idle: int) -> list[int]:
        assert idle == 1
        partners = [n for n, job in enumerate(waiting) if n and (job - waiting[0]) % 2 == (waiting[0] == 2)]
        return [0, *partners[-1:]] if waiting[0] != 1 else [0, 2]

    run(scenario, choose=choose)


def test_second_thread_begins_a_batch_during_the_first():
    async def scenario(batcher, work):
        first = await under_way(batcher, work)
        second = asyncio.create_task(batcher.results([1]))
        while len(work.batches) < 2:
            await asyncio.sleep(0.001)
        assert not first.done()
        work.go.set()
        assert await first == [0] and await second == [10]

    run(scenario, threads=2)


def test_jobs_are_read_before_they_wait_and_a_bad_request_fails_alone():
    def read(jobs: list[str]) -> list[int]:
        return [int(job) for job in jobs]

    async def scenario(batcher, work):
        work.go.set()
        good, bad = await asyncio.gather(
            batcher.results(["1", "2"]), batcher.results(["3", "x"]), return_exceptions=True
        )
        assert good == [10, 20] and isinstance(bad, ValueError)
        assert batcher.waiting == 0 and [3] not in work.batches

    run(scenario, read=read)

"""Late errors of a failed Orbax do not reach the user; all other errors do."""

import asyncio
import sys

import tensorstore

from jaxir.interop.weights.quiet import quiet_orbax


def answer_after_the_loop_is_closed():
    """Does as Orbax does when one array of a checkpoint is broken and another is still being read."""
    promise, future = tensorstore.Promise.new()

    async def read():
        await future

    loop = asyncio.new_event_loop()
    reading = loop.create_task(read())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    promise.set_result(1)
    return reading


def test_only_late_reads_of_orbax_are_ignored(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda details: reported.append(details.exc_value))
    answer_after_the_loop_is_closed()
    assert [str(e) for e in reported] == ["Event loop is closed"]  # else this tests nothing
    with quiet_orbax():
        pass
    answer_after_the_loop_is_closed()
    assert len(reported) == 1

    class Failing:
        def __del__(self):
            raise ValueError("not Orbax's")

    Failing()
    assert str(reported[-1]) == "not Orbax's"

"""Draws the next item of an iterator while the present one is used."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`; a thread draws the next item while the consumer uses the present one."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        future: Future[Any] = pool.submit(next, items, end)
        while (item := future.result()) is not end:
            future = pool.submit(next, items, end)
            yield item

"""A few threads that do a list of tasks together with their caller.

Which thread does which task, and when, never changes a result: tasks share nothing that they write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class Crew:
    """`threads` counts the caller."""

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(self._helpers, "dcnr-shard") if self._helpers else None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Results in the order of the tasks, which begin in that order. Raises the error of a task that failed, when all have ended."""
        if self._pool is None or len(tasks) < 2:
            return [task() for task in tasks]
        line = deque(enumerate(tasks))
        results: dict[int, T] = {}

        def work() -> None:
            while True:
                try:
                    index, task = line.popleft()
                except IndexError:
                    return
                results[index] = task()

        helping = [self._pool.submit(work) for _ in range(min(self._helpers, len(tasks) - 1))]
        try:
            work()
        finally:
            wait(helping)
        for helper in helping:
            helper.result()
        return [results[index] for index in range(len(tasks))]

    def close(self) -> None:
        """Let the threads end, after what they are doing."""
        if self._pool is not None:
            self._pool.shutdown()

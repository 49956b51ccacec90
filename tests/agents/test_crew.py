"""Threads that share a list of tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from dcnr.agents.crew import Crew


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_are_in_the_order_of_the_tasks(threads: int) -> None:
    """However many threads, results line up with tasks."""
    crew = Crew(threads)
    tasks: list[Callable[[], int]] = [partial(pow, number, 2) for number in range(20)]
    assert crew.run(tasks) == [number * number for number in range(20)]
    assert crew.run([]) == []
    crew.close()


def test_tasks_run_at_the_same_time() -> None:
    """Two tasks that wait for each other end, on two threads."""
    crew = Crew(2)
    meeting = threading.Barrier(2, timeout=10)
    crew.run([meeting.wait, meeting.wait])
    crew.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_a_task_is_raised_when_all_have_ended(threads: int) -> None:
    """The crew works on afterwards."""
    crew = Crew(threads)

    def fail() -> int:
        raise ValueError("no")

    good: Callable[[], int] = partial(abs, -1)
    with pytest.raises(ValueError, match="no"):
        crew.run([good, fail])
    with pytest.raises(ValueError, match="no"):
        crew.run([fail, good])
    assert crew.run([good, good]) == [1, 1]
    crew.close()

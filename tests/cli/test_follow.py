"""What is told of a run is shown and written; how a run ends decides how the command does."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.cli.follow import follow
from dcnr.client.follow import End, News, Note
from dcnr.client.session import Session
from dcnr.errors import DcnrError
from dcnr.metrics.writers import Writers
from tests.metrics.rows import S, step, validation
from tests.metrics.test_writers import Memory


class Story(Session):
    """A session of which this is told."""

    def __init__(self, *told: News) -> None:
        self._told = told
        self.first: int | None = None

    async def news(self, first: int | None = None) -> AsyncIterator[News]:
        """One after the other."""
        self.first = first
        for one in self._told:
            yield one


class View:
    """Takes down what is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def step(self, row: StepMetrics) -> None:
        """A step."""
        self.shown.append(f"step {row.step}")

    def validation(self, row: ValidationMetrics) -> None:
        """A validation."""
        self.shown.append(f"validation {row.step}")

    def note(self, text: str) -> None:
        """A note."""
        self.shown.append(text)

    def done(self, session: str, final_loss: float | None) -> None:
        """The good end."""
        self.shown.append(f"done {final_loss}")

    def ended(self, session: str, state: str, step: int, reason: str) -> None:
        """Another end."""
        self.shown.append(state)


async def shown(*told: News, writers: Writers | None = None) -> list[str]:
    """What is shown of it."""
    view = View()
    await follow(Story(*told), view, writers or Writers())
    return view.shown


async def test_rows_are_shown_and_written_and_notes_shown() -> None:
    """Writing begins with the last row that is there: its validation may be lacking."""
    writer, told = Memory(last_step=1), (step(1), Note("by the way"), step(2), validation(2), End(S, "done", 2, 0.5))
    story, view = Story(*told), View()
    await follow(story, view, Writers([writer]))
    assert story.first == 1
    assert view.shown == ["step 1", "by the way", "step 2", "validation 2", "done 0.5"]
    assert writer.rows == [2, -2]


async def test_a_file_that_cannot_be_written_is_a_note() -> None:
    """And showing goes on."""
    found = await shown(step(1), step(2), End(S, "done", 2, 0.5), writers=Writers([Memory(breaks_at=1)]))
    assert [line.split(" could")[0] for line in found] == ["step 1", "memory", "step 2", "done 0.5"]


async def test_a_run_that_is_done_early_says_why() -> None:
    """In a note before its end."""
    assert await shown(End(S, "done", 2, 0.5, "stopped early")) == ["session s stopped early", "done 0.5"]


@pytest.mark.parametrize("state", ["suspended", "deleted"])
async def test_a_run_that_is_over_for_now_is_a_note(state: str) -> None:
    """With the reason."""
    assert await shown(End(S, state, 2, 0.5, "by request")) == [state, f"session s is {state} at step 2: by request"]


async def test_a_run_that_failed_is_an_error() -> None:
    """With the run's own reason."""
    with pytest.raises(DcnrError, match="session s failed at step 2: out of memory"):
        await shown(End(S, "failed", 2, 0.5, "out of memory"))

"""Weights & Biases: one run for each session, gone on with where it was left. A stand-in takes the place of the library."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from dcnr.errors import UserError
from dcnr.metrics.wandb_writer import WandbWriter
from tests.metrics.rows import S, step, validation


class Run:
    """What the library calls a run."""

    def __init__(self, asked: dict[str, Any], step: int, resumed: bool) -> None:
        self.asked = asked
        self.step = step
        self.resumed = resumed
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        """Keep it."""
        self.logged.append((step, values))

    def finish(self) -> None:
        """The end."""
        self.finished = True


class Library(ModuleType):
    """The library: it has been away, or has a run of so many steps."""

    Error = type("Error", (Exception,), {})

    def __init__(self, steps: int = 0, refuses: bool = False) -> None:
        super().__init__("wandb")
        self.run: Run | None = None
        self._steps = steps
        self._refuses = refuses

    def init(self, **asked: Any) -> Run:
        """Open a run."""
        if self._refuses:
            raise self.Error("no API key")
        self.run = Run(asked, self._steps + 1 if self._steps else 0, self._steps > 0)
        return self.run


def installed(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> Library | None:
    """Put it where `import wandb` looks; None: it is not installed."""
    monkeypatch.setitem(sys.modules, "wandb", library)
    return library


def test_rows_go_to_a_run_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its name; what is not known is left out."""
    library = installed(monkeypatch, Library())
    writer = WandbWriter("books", S, new=True)
    assert (writer.last_step, writer.last_validation) == (0, 0)
    writer.step(step(1, loss=2.5))
    writer.validation(validation(1, loss=2.75))
    writer.close()
    assert library is not None
    run = library.run
    assert run is not None
    assert run.asked == {"project": "books", "id": "s", "name": "s", "resume": "never"}
    (number, values), (again, validated) = run.logged
    assert (number, values["train/loss"], "train/mfu" in values) == (1, 2.5, False)
    assert (again, validated) == (1, {"validation/loss": 2.75, "validation/perplexity": 1.6, "validation/bits_per_byte": 0.7})
    assert (writer.last_step, writer.last_validation, run.finished) == (1, 1, True)


def test_a_run_that_is_there_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last step."""
    installed(monkeypatch, Library(steps=40))
    assert WandbWriter("books", S).last_step == 40


def test_a_library_that_is_missing_or_refuses_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the library's own is shown."""
    installed(monkeypatch, None)
    with pytest.raises(UserError, match="pip install 'dcnr"):
        WandbWriter("books", S)
    installed(monkeypatch, Library(refuses=True))
    with pytest.raises(UserError, match=r"no API key.*wandb login"):
        WandbWriter("books", S)

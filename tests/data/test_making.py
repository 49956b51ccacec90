"""The folder in which a dataset is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.data.making import FINAL, making
from dcnr.errors import UserError


def test_two_cannot_make_the_same(tmp_path: Path) -> None:
    """The second is told, and takes nothing away from the first."""
    with making(tmp_path / "work") as work:
        (work / "file").touch()
        with pytest.raises(UserError, match="another process is making this dataset"), making(tmp_path / "work"):
            pass
        assert (work / "file").exists()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("error", "stays"), [(UserError("bad input"), False), (KeyboardInterrupt(), True), (OSError("no room"), True)])
def test_what_is_done_stays_unless_the_input_is_bad(tmp_path: Path, error: BaseException, stays: bool) -> None:
    """Who was interrupted, or ran out of room, can go on; but what was to become the dataset is made anew."""

    def fail() -> None:
        with making(tmp_path / "work") as work:
            (work / FINAL).mkdir()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "work").exists() == stays
    with making(tmp_path / "work") as work:
        assert not (work / FINAL).exists()

"""What `--set` may set."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dcnr.optim.hyper import Hyper


def test_values_may_be_strings_and_unknown_keys_are_refused() -> None:
    """As the command line gives them."""
    assert Hyper.model_validate({"lr": "1e-3", "warmup_steps": "10"}).lr == 1e-3
    with pytest.raises(ValidationError, match="learning_rate"):
        Hyper.model_validate({"learning_rate": 1e-3})


@pytest.mark.parametrize(("key", "value"), [("lr", 0), ("beta1", 1), ("clip_norm", -1), ("shards", 0), ("optimizer", "lion")])
def test_what_makes_no_sense_is_refused(key: str, value: object) -> None:
    """By name."""
    with pytest.raises(ValidationError, match=key):
        Hyper.model_validate({key: value})

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


def test_validations_come_every_so_many_steps_and_after_the_last() -> None:
    """None at all if they are not asked for; the next one, and how many there are between two steps."""
    hyper, never = Hyper(validate_every=4), Hyper()
    assert [step for step in range(11) if hyper.validates(step, 10)] == [4, 8, 10]
    assert [hyper.next_validation(after, 10) for after in (0, 3, 4, 8, 10)] == [4, 4, 8, 10, 10]
    for after in range(11):
        for step in range(11):
            assert hyper.validations(after, step, 10) == sum(hyper.validates(one, 10) for one in range(after + 1, step + 1))
    assert not any(never.validates(step, 10) for step in range(11))
    assert (never.next_validation(3, 10), never.validations(0, 10, 10)) == (10, 0)


@pytest.mark.parametrize(("key", "value"), [("lr", 0), ("beta1", 1), ("clip_norm", -1), ("shards", 0), ("optimizer", "lion")])
def test_what_makes_no_sense_is_refused(key: str, value: object) -> None:
    """By name."""
    with pytest.raises(ValidationError, match=key):
        Hyper.model_validate({key: value})

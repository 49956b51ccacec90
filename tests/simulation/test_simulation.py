"""Small clusters on virtual time: whatever goes wrong, the weights and the training log are those of the undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from itertools import count, islice

import numpy as np
import pytest

from dcnr.agents.execution import Execution
from tests.simulation.campaign import Tally, campaign, run
from tests.simulation.disk import Now
from tests.simulation.faults import draw
from tests.simulation.networks import VARIANTS, Variant, reference

SEEDS = 1
"""The first one; raise it to look elsewhere."""
SECONDS = 20.0
"""For as many runs as fit: about 8 a second on one free core."""
LEAST = 10
"""Runs that even a busy machine does in that time."""


def failures_of(tally: Tally) -> str:
    """Each with the command that repeats it."""
    return "\n".join(f"{failure}\n{failure.story}" for failure in tally.failures)


def test_calm_runs_give_what_one_process_gives() -> None:
    """Without faults the machines, on any number of agents, come to the weights and losses of a plain loop over one `Execution`."""
    calm = (seed for seed in count(SEEDS) if draw(seed).style == "calm")
    tally = campaign((next(calm) for _ in range(8)), SECONDS)
    assert not tally.failures, failures_of(tally)
    assert tally.runs == 8
    assert not tally.seen["again"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_step_more_gives_other_weights(variant: Variant) -> None:
    """Every late step changes every tensor that learns, so a step that is lost or done twice shows in the result."""
    one, more = reference(variant, 6), reference(variant, 7)
    assert one.losses == more.losses[:-1]
    same = [name for name, tensor in one.tensors.items() if np.array_equal(tensor, more.tensors[name])]
    assert not same


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_whatever_goes_wrong_the_result_is_the_same() -> None:
    """As many runs as fit the time, from simple faults to wild ones; all remedies are used among them."""
    tally = campaign(count(SEEDS), SECONDS)
    assert not tally.failures, failures_of(tally)
    assert tally.runs >= LEAST
    assert all(tally.seen[remedy] for remedy in ("again", "back", "from memory", "adopted", "faults"))


def test_a_seed_is_a_run() -> None:
    """The same seed does the same things in another process, whose sets and dictionaries are ordered otherwise."""
    seed = next(seed for seed in count(SEEDS) if draw(seed).style == "wild")
    with closing(Now()) as now:
        _, outcome = run(seed, now)
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    said = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=50, check=True)
    assert said.stdout.splitlines()[-1] == str(outcome)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new attempt did not forget what was computed before, some run would end with other weights."""
    monkeypatch.setattr(Execution, "abort", lambda _self: None)
    noisy = (seed for seed in count(SEEDS) if draw(seed).style in ("noise", "wild"))
    tallies = (campaign([seed], SECONDS) for seed in islice(noisy, 60))
    assert any("tensors differ" in failure.why for tally in tallies for failure in tally.failures)

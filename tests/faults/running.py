"""The session that all tests of this folder disturb, and what must be true of it afterwards."""

from __future__ import annotations

from itertools import count

from tests.acceptance.running import same_bits
from tests.faults.cluster import Cluster, Session, Tensors, losses_of

STEPS, EVERY = 24, 6
BEFORE = 8
"""The step at which something happens: two after a checkpoint."""
IN_FLIGHT = 0.2
"""Seconds in which rows that were told before may still come."""
_numbers = count(1)


async def begin(cluster: Cluster, pnodes: int = 2, steps: int = STEPS) -> Session:
    """A session of its own name, at its first step."""
    session = await cluster.session(f"disturbed-{next(_numbers)}", steps, EVERY, pnodes)
    await session.until_step(1)
    return session


async def same_end(session: Session, undisturbed: Tensors) -> None:
    """It ends; its log has one row a step, and what was heard is in it; its last checkpoint is the undisturbed one, bit for bit."""
    await session.until_state("done")
    heard, kept = losses_of(session), await session.log()
    assert heard == {step: kept[step] for step in heard}
    assert same_bits(await session.tensors(STEPS), undisturbed)

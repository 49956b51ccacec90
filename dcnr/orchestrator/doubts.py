"""Which PNodes a session would rather do without, and how often the world has failed it.

Rule 1: one that is stuck is left alone until it does more work, or has none.
Rule 2: one that failed comes last in placement until a step is done, one that refused until it is started anew.
Rule 3: trouble of the world is borne `SETBACKS` times without a step done in between.
"""

from __future__ import annotations

from dcnr.bus.messages import Hosted
from dcnr.ids import PNodeId

SETBACKS = 3
"""How often the world may fail a session without a step done in between."""


class Doubts:
    """Of one session."""

    def __init__(self) -> None:
        self.avoided: dict[PNodeId, int] = {}
        """PNodes that are stuck, with the `work` that they had done."""
        self.shunned: dict[PNodeId, bool] = {}
        """PNodes that failed (False) or refused (True)."""
        self.setbacks = 0
        """How often the world failed since a step was done."""

    def begin(self) -> None:
        """It is started, or resumed."""
        self.shunned.clear()
        self.setbacks = 0

    def step_done(self) -> None:
        """Whoever takes part is good for something."""
        self.shunned = {pnode: refused for pnode, refused in self.shunned.items() if refused}
        self.setbacks = 0

    def lost(self, pnode: PNodeId) -> None:
        """Its process is gone: the next one is another."""
        self.avoided.pop(pnode, None)
        self.shunned.pop(pnode, None)

    def stuck(self, pnode: PNodeId, work: int) -> None:
        """It has work, and does none."""
        self.avoided[pnode] = work

    def stands(self, pnode: PNodeId, hosted: Hosted | None) -> None:
        """It says where it stands."""
        if pnode in self.avoided and (hosted is None or not hosted.busy or hosted.work != self.avoided[pnode]):
            del self.avoided[pnode]

    def refused(self, pnode: PNodeId) -> None:
        """It does not take its part."""
        self.shunned[pnode] = True

    def failed(self, pnode: PNodeId) -> bool:
        """The world failed it. Whether that was once too often."""
        self.setbacks += 1
        self.shunned.setdefault(pnode, False)
        return self.setbacks > SETBACKS

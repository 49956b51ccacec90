"""A manifest for tests that care for nothing in it but where its tensors are."""

from __future__ import annotations

from collections.abc import Sequence

from dcnr.bus.messages import SavedPart
from dcnr.ids import Epoch, NetworkId, SessionId
from dcnr.optim.decide import ScalerState
from dcnr.storage.checkpoint import Manifest

NETWORK = "name: net\nnodes: []  # é\n"


def manifest_of(session: SessionId, step: int, epoch: int, parts: Sequence[SavedPart]) -> Manifest:
    """Every field is filled, with numbers of every type among the hyper-parameters."""
    return Manifest(
        session=session,
        network=NetworkId("net"),
        network_file=NETWORK,
        dataset="books",
        step=step,
        epoch=Epoch(epoch),
        seed=7,
        total_steps=100,
        batch=8,
        micro_batches=2,
        fuse=True,
        hyper={"optimizer": "adamw", "lr": 0.1 + 0.2, "decay_steps": None, "shards": 2, "flag": True, "eps": 1.0},
        state=ScalerState(updates=4, loss_scale=2.0**15, good_steps=3, dynamic=True),
        parts=tuple(parts),
        kernel="SkylakeX",
        created="2026-01-01T00:00:00+00:00",
        dcnr_version="0.1.0",
    )

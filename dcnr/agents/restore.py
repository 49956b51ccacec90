"""What a deploy begins with: from copies in memory, from storage, or from the seed; and whose fault it is if that fails.

Rule 1: what is in memory is not read; where nothing is missing, storage is not asked.
Rule 2: storage that is out of reach, or is not the orchestrator's, is refused with the reason: later, or elsewhere, it may be there.
Rule 3: a checkpoint that is there and cannot be used is damaged, for everyone.
Rule 4: whatever else goes wrong is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from dcnr.agents.commands import Tensors
from dcnr.agents.events import SetupFailed, SetupRefused
from dcnr.agents.plan import Plan
from dcnr.agents.runner import describe, is_world, trace_of
from dcnr.agents.weights import tensor_names
from dcnr.backends.base import HostArray
from dcnr.bus.messages import Deploy
from dcnr.errors import BackendUnavailable, DcnrError, UserError, WorldError
from dcnr.storage.base import Storage, open_storage
from dcnr.storage.checkpoint import DAMAGED, read_manifest_at, read_tensors

OUT_OF_REACH = (UserError, BackendUnavailable, WorldError, OSError)
"""What storage raises that does not answer, or that this machine cannot use."""

Open = Callable[[str], Storage]


async def find_storage(deploy: Deploy, find: Open = open_storage) -> SetupRefused | None:
    """None if the storage of a deploy is the one that its orchestrator sees."""
    if deploy.probe is None:
        return None
    try:
        if await find(deploy.storage).exists(deploy.probe):
            return None
    except OUT_OF_REACH as error:
        return _refused(deploy, error)
    reason = (
        f"{deploy.storage} on this host is not the folder that the orchestrator sees: {deploy.probe} is not in it"
        " (mount the same folder on every host, or store at s3://)"
    )
    return SetupRefused(deploy.session, deploy.epoch, reason, damaged=False)


async def restore(deploy: Deploy, plan: Plan, kept: Tensors, find: Open = open_storage) -> Tensors | SetupRefused | None:
    """The canonical tensors that `plan` begins with, of which `kept` need not be read; None to begin with the seed."""
    names = tensor_names(plan.graph, plan.nodes, plan.hyper if deploy.purpose == "train" else None)
    missing = [name for name in names if name not in kept]
    if not missing:
        return {name: kept[name] for name in names}
    if deploy.checkpoint is None:
        return None
    try:
        storage = find(deploy.storage)
        found = await read_tensors(storage, await read_manifest_at(storage, deploy.checkpoint), missing)
    except DAMAGED as error:
        return SetupRefused(deploy.session, deploy.epoch, str(error), damaged=True)
    except OUT_OF_REACH as error:
        return _refused(deploy, error)
    read = await asyncio.to_thread(_own, found)
    return {name: kept[name] if name in kept else read[name] for name in names}


def _own(tensors: Tensors) -> dict[str, HostArray]:
    """Copies, since what was read are views that keep whole parts in memory."""
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def _refused(deploy: Deploy, error: Exception) -> SetupRefused:
    return SetupRefused(deploy.session, deploy.epoch, f"storage {deploy.storage} is out of reach: {told(error)}", damaged=False)


def setup_failed(deploy: Deploy, error: Exception) -> SetupFailed:
    """The event for whatever broke."""
    return SetupFailed(deploy.session, deploy.epoch, told(error), trace_of(error), is_world(error))


def told(error: Exception) -> str:
    """One line for the user."""
    return str(error) if isinstance(error, DcnrError) else describe(error)

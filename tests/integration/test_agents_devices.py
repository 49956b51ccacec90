"""Agents whose GPUs run on the CPU: the same losses wherever the nodes lie, and whichever way tensors take between devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dcnr.agents.shell import Shell
from dcnr.backends.base import HostArray
from dcnr.backends.cupy.array import DeviceArray
from dcnr.backends.cupy.backend import CupyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import WITH_DEVICE, Deploy, PNodeInfo
from dcnr.ids import PNodeId
from tests.agents.tiny import SEQ, TINY, VOCABULARY, A, B, alternate, deploy_of, graph_of
from tests.backends.cupy.emulator.device import EmulatedDevice, get
from tests.bus.lanes.devices import FakeHost, FakePort
from tests.integration.scripted import Trainer, agents, batches, info_of

BATCH, STEPS = 4, 3
HALF = TINY.replace("name: tiny", "name: tiny\nprecision: fp16")


class OpenPort(FakePort):
    """Copies between emulated devices, whose memory is that of this process."""

    device: EmulatedDevice

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:  # type: ignore[override]  # not NumPy memory here
        """Of the device."""
        return self.device.empty(shape, dtype)

    def fetch(self, buffer: DeviceArray) -> HostArray:  # type: ignore[override]
        """As it is."""
        return get(buffer)


class OpenDevice(EmulatedDevice):
    """One whose memory others of its host may open."""

    host = FakeHost()

    def ipc(self) -> OpenPort:  # type: ignore[override]
        """Of this device."""
        port = OpenPort(self.host)
        port.device = self
        return port


async def train(deploy: Deploy, infos: Sequence[PNodeInfo]) -> tuple[list[float], dict[str, int]]:
    """Losses of a few steps, and over which lanes tensors came."""
    broker = MemoryBroker()
    trainer = await Trainer.join(broker, graph_of(deploy.network_file, deploy.fuse), deploy, infos)
    try:
        async with agents(broker, lambda: CupyBackend(OpenDevice(90)), infos) as shells:
            await trainer.start()
            losses = [await trainer.step(step, ids) for step, ids in enumerate(batches(VOCABULARY, SEQ, BATCH, STEPS), 1)]
            return losses, _lanes(shells.values())
    finally:
        await trainer.leave()


def _lanes(shells: Iterable[Shell]) -> dict[str, int]:
    found: dict[str, int] = {}
    for shell in shells:
        for lane, count in shell.telemetry.received.items():
            found[lane] = found.get(lane, 0) + count
    return found


def run(homes: Sequence[PNodeId], hosts: Sequence[str]) -> tuple[list[float], dict[str, int]]:
    """The fused half-precision network, its nodes on these PNodes in turn, on these hosts."""
    graph = graph_of(HALF, fuse=True)
    infos = [replace(info_of(home), backend=WITH_DEVICE, host=host) for home, host in zip(homes, hosts, strict=True)]
    deploy = deploy_of(alternate(graph, list(homes)), text=HALF, fuse=True, batch=BATCH, micro_batches=2)
    return asyncio.run(train(deploy, infos))


def test_tensors_go_from_device_to_device_and_change_no_bit() -> None:
    """Two devices of one host give the losses of one device."""
    alone, _ = run([A], ["here"])
    near, lanes = run([A, B], ["here", "here"])
    assert near == alone
    assert lanes["cuda"]


def test_devices_that_are_apart_meet_through_their_hosts() -> None:
    """And give the same losses."""
    alone, _ = run([A], ["here"])
    apart, lanes = run([A, B], ["here", "there"])
    assert apart == alone
    assert "cuda" not in lanes

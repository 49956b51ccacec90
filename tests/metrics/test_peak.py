"""MFU: operations as `dcnr network analyze` has them, over the peak of the devices; nothing where that is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcnr.bus.messages import PNodeInfo
from dcnr.ids import PNodeId
from dcnr.metrics.peak import PEAKS, main_precision, peak_share
from dcnr.network.graph import Graph
from dcnr.network.load import load_graph
from dcnr.passes import prepare
from dcnr.placement.analyze import analyze

TINY = (Path(__file__).parents[2] / "networks" / "tiny.yml").read_text()


def info(name: str, device: str, host: str = "h") -> PNodeInfo:
    """A PNode on a device."""
    return PNodeInfo(PNodeId(name), "i", host, "cupy", device, 1, 0, 1, 1, "0")


def graph(precision: str = "float32") -> Graph:
    """The tiny network."""
    return load_graph(TINY.replace("precision: float32", f"precision: {precision}"), "tiny.yml")


@pytest.mark.parametrize(("precision", "peak"), [("float32", 66.9e12), ("bfloat16", 989.4e12), ("float16", 989.4e12)])
def test_the_share_of_a_token_is_its_operations_over_the_peak(precision: str, peak: float) -> None:
    """In the precision in which most operations are done."""
    found = graph(precision)
    running = prepare(found, fuse=True)
    assert main_precision(running) == precision
    share = peak_share(running, [info("a", "NVIDIA H200 (0)")])
    assert share == pytest.approx(analyze(found, 1).flops_per_token / peak)


def test_devices_are_added_each_once() -> None:
    """Two PNodes of one GPU share its peak; the same number on another host is another GPU."""
    running = prepare(graph(), fuse=True)
    one = peak_share(running, [info("a", "NVIDIA H200 (0)"), info("b", "NVIDIA H200 (0)")])
    two = peak_share(running, [info("a", "NVIDIA H200 (0)"), info("b", "NVIDIA H200 (1)")])
    three = peak_share(running, [info("a", "NVIDIA H200 (0)"), info("b", "NVIDIA H200 (0)", host="g"), info("c", "NVIDIA H200 (1)")])
    assert one is not None
    assert two == pytest.approx(one / 2)
    assert three == pytest.approx(one / 3)


def test_nothing_is_said_where_a_peak_is_unknown() -> None:
    """CPUs, GPUs that are not listed, slices of GPUs, and a precision that a GPU does not have."""
    running = prepare(graph(), fuse=True)
    for device in ("x86_64", "NVIDIA Something New (0)", "NVIDIA H200 MIG 1g.18gb (0)", ""):
        assert peak_share(running, [info("a", device)]) is None
        assert peak_share(running, [info("a", "NVIDIA H200 (0)"), info("b", device)]) is None
    assert peak_share(running, []) is None
    assert peak_share(prepare(graph("bfloat16"), fuse=True), [info("a", "Tesla T4 (0)")]) is None
    assert peak_share(prepare(graph("float16"), fuse=True), [info("a", "Tesla T4 (0)")]) is not None


def test_the_table_is_plausible() -> None:
    """Tensor cores are faster than what is beside them, and no figure is one with sparsity (or off by a thousand)."""
    for name, peak in PEAKS.items():
        assert 8 <= peak.float32 < peak.halves <= 2500, name

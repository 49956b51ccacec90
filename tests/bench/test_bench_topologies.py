"""The report of the step benchmark holds what was measured, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from bench_topologies import BARE, DCNR, TORCH, Options, Samples, Spread, report
from cases import CASES
from clocks import Reading
from turns import Fields

from dcnr.passes import prepare

OPTIONS = Options(CASES["2"], "cupy", "compile", "fp16", 128, 1, 80, 2, 1, (0,), portable=False)
READY = {"device": "some GPU", "torch": "2.0", "ceiling": 700e12}


def samples(ms: float, peak: int | None) -> Samples:
    """Two turns around `ms`, with the card at its power limit."""
    results: list[Fields] = [{"median_ms": ms, "ms": ms * share, "peak": peak} for share in (0.9, 1.1)]
    return Samples(results, [Reading(1400.0, 690.0), Reading(None, None)])


def test_the_report_has_ratio_overhead_and_utilisation() -> None:
    """Medians over the turns; 18.63 TFLOP a step against a ceiling of 700 are 63 % of it in 42 ms."""
    measured = {TORCH: samples(60.0, 17 << 30), BARE: samples(42.0, 12 << 30), DCNR: samples(43.0, 12 << 30)}
    text = report(OPTIONS, READY, measured, Spread())
    assert "one step is 18.6 TFLOP; the fastest product of this device, sustained: 700 TFLOP/s" in text
    assert "| PyTorch 2.0 (compile) | 60.00 ms | 60.00 ms | 1,092,267 | 17.00 GiB | 44.3% | 1,400 MHz | 690 W |" in text
    assert "| DCNR, bare executor | 42.00 ms | 42.00 ms | 1,560,381 | 12.00 GiB | 63.4% | 1,400 MHz | 690 W |" in text
    assert "DCNR / PyTorch 2.0 (compile), back to back: **0.717**" in text
    assert "agents, bus and session add 1.00 ms to the bare executor's 42.00 ms: +2.4%" in text


def test_what_could_not_be_read_is_left_open() -> None:
    """No memory of a CPU run, no clock without a driver."""
    result: Fields = {"median_ms": 5.0, "ms": 5.0, "peak": None}
    nothing = Samples([result], [Reading(None, None)])
    text = report(OPTIONS, READY, {TORCH: nothing, DCNR: nothing}, Spread())
    assert "| 5.00 ms | 5.00 ms | 13,107,200 | – | 532.2% | – | – |" in text
    assert "bare executor" not in text


def test_two_agents_tell_what_they_send_and_how_long_that_takes() -> None:
    """One border between the blocks and the head's side: 64 MiB there, and 64 back, at the measured rate of the lane."""
    nodes = [str(node.id) for node in prepare(CASES["2"].graph(), fuse=True).nodes]
    border = nodes.index("block_3_gelu")
    homes = {node: "a" if at <= border or node == "loss" else "b" for at, node in enumerate(nodes)}
    links = {("a", "b"): ("shm", 5_000.0), ("b", "a"): ("shm", 2_500.0)}
    options = replace(OPTIONS, agents=2, micro_batches=4)
    text = report(options, READY, {TORCH: samples(60.0, None), DCNR: samples(100.0, None)}, Spread(homes, links))
    assert "batch 128 × 512, fp16, DCNR in 4 micro-batches" in text
    assert "tensors cross between 2 agents" in text
    (there,) = re.findall(r"a → b: ([\d.]+) MiB a step by shm, 5,000 MB/s: ([\d.]+) ms, (\d+)% of a step", text)
    (back,) = re.findall(r"b → a: ([\d.]+) MiB a step by shm, 2,500 MB/s: ([\d.]+) ms, (\d+)% of a step", text)
    assert there[0] == back[0]  # each tensor has a gradient of its size
    assert float(there[1]) == pytest.approx(float(there[0]) * 2**20 / 5e6, rel=1e-2)
    assert int(back[2]) == pytest.approx(2 * int(there[2]), abs=1)

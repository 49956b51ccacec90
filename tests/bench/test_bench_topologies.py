"""The report of the step benchmark holds what was measured, and nothing else."""

from __future__ import annotations

from bench_topologies import BARE, DCNR, TORCH, Options, Samples, report
from cases import CASES
from clocks import Reading
from turns import Fields

OPTIONS = Options(CASES["2"], "cupy", "compile", "fp16", 128, 80, 2, 1, (0,), portable=False)
READY = {"device": "some GPU", "torch": "2.0", "ceiling": 700e12}


def samples(ms: float, peak: int | None) -> Samples:
    """Two turns around `ms`, with the card at its power limit."""
    results: list[Fields] = [{"median_ms": ms, "ms": ms * share, "peak": peak} for share in (0.9, 1.1)]
    return Samples(results, [Reading(1400.0, 690.0), Reading(None, None)])


def test_the_report_has_ratio_overhead_and_utilisation() -> None:
    """Medians over the turns; 18.63 TFLOP a step against a ceiling of 700 are 63 % of it in 42 ms."""
    measured = {TORCH: samples(60.0, 17 << 30), BARE: samples(42.0, 12 << 30), DCNR: samples(43.0, 12 << 30)}
    text = report(OPTIONS, READY, measured, {})
    assert "one step is 18.6 TFLOP; the fastest product of this device, sustained: 700 TFLOP/s" in text
    assert "| PyTorch 2.0 (compile) | 60.00 ms | 60.00 ms | 1,092,267 | 17.00 GiB | 44.3% | 1,400 MHz | 690 W |" in text
    assert "| DCNR, bare executor | 42.00 ms | 42.00 ms | 1,560,381 | 12.00 GiB | 63.4% | 1,400 MHz | 690 W |" in text
    assert "DCNR / PyTorch 2.0 (compile), back to back: **0.717**" in text
    assert "agents, bus and session add 1.00 ms to the bare executor's 42.00 ms: +2.4%" in text


def test_what_could_not_be_read_is_left_open() -> None:
    """No memory of a CPU run, no clock without a driver."""
    result: Fields = {"median_ms": 5.0, "ms": 5.0, "peak": None}
    nothing = Samples([result], [Reading(None, None)])
    text = report(OPTIONS, READY, {TORCH: nothing, DCNR: nothing}, {})
    assert "| 5.00 ms | 5.00 ms | 13,107,200 | – | 532.2% | – | – |" in text
    assert "bare executor" not in text

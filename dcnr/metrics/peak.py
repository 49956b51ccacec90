"""How much of what devices can do at most a training run uses: model FLOPs utilisation, MFU.

Rule 1: operations are those of the network, forward and backward, as `dcnr network analyze` counts them; what is computed twice counts
once.
Rule 2: a peak is the maker's figure for dense products with sums in float32: on tensor cores for float16 and bfloat16, without them for
float32, as products are computed here. Of a network of several precisions that of most of its operations counts.
Rule 3: the peaks of all devices that take part are added, each once, however many PNodes share it. Where one is unknown, nothing is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dcnr.bus.messages import PNodeInfo
from dcnr.network.graph import Graph
from dcnr.nodes.spec import StorePrecision
from dcnr.placement.analyze import flops_per_token
from dcnr.placement.cost import graph_costs


@dataclass(frozen=True, slots=True)
class Peak:
    """Tera-operations per second. `halves`: float16 and bfloat16, if the device has it."""

    float32: float
    halves: float
    bfloat16: bool = True

    def of(self, precision: StorePrecision) -> float:
        """Operations per second; 0 if there is no figure."""
        if precision == "float32":
            return self.float32 * 1e12
        return 0.0 if precision == "bfloat16" and not self.bfloat16 else self.halves * 1e12


PEAKS = {
    "NVIDIA B200": Peak(75.0, 2250.0),
    "NVIDIA H200": Peak(66.9, 989.4),
    "NVIDIA H200 NVL": Peak(60.0, 835.5),
    "NVIDIA H100 80GB HBM3": Peak(66.9, 989.4),
    "NVIDIA H100 NVL": Peak(60.0, 835.5),
    "NVIDIA H100 PCIe": Peak(51.2, 756.0),
    "NVIDIA A100-SXM4-40GB": Peak(19.5, 312.0),
    "NVIDIA A100-SXM4-80GB": Peak(19.5, 312.0),
    "NVIDIA A100-PCIE-40GB": Peak(19.5, 312.0),
    "NVIDIA A100 80GB PCIe": Peak(19.5, 312.0),
    "NVIDIA L40S": Peak(91.6, 362.0),
    "NVIDIA L4": Peak(30.3, 121.0),
    "NVIDIA A10": Peak(31.2, 125.0),
    "NVIDIA GeForce RTX 4090": Peak(82.6, 165.2),
    "NVIDIA GeForce RTX 3090": Peak(35.6, 71.0),
    "Tesla T4": Peak(8.1, 65.0, bfloat16=False),
    "Tesla V100-SXM2-16GB": Peak(15.7, 125.0, bfloat16=False),
    "Tesla V100-SXM2-32GB": Peak(15.7, 125.0, bfloat16=False),
}
"""By the name that the driver gives; a slice of a device has a name of its own, which is not here."""


def peak_share(running: Graph, hosts: Sequence[PNodeInfo]) -> float | None:
    """What one token per second of a prepared graph takes of the devices of `hosts`; None where that is not known."""
    found = [PEAKS.get(device.rpartition(" (")[0]) for _, device in {(info.host, info.device) for info in hosts}]
    known = [peak for peak in found if peak is not None]
    if not known or len(known) < len(found):
        return None
    precision = main_precision(running)
    peaks = [peak.of(precision) for peak in known]
    return flops_per_token(running) / sum(peaks) if all(peaks) else None


def main_precision(running: Graph) -> StorePrecision:
    """That in which most operations are done."""
    done: Counter[StorePrecision] = Counter()
    for node, cost in graph_costs(running, 1).items():
        done[running.by_id[node].activation_precision] += cost.flops
    return done.most_common(1)[0][0]

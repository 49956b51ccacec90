"""DCNR: neural networks written in YAML, trained as graphs of small agents over a message bus.

    async with dcnr.connect() as cluster:
        session = await cluster.train("networks/tiny.yml", dataset="books", steps=1000)
        async for step in session:
            print(step.step, step.loss)

Names are imported when they are first used, so `import dcnr` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dcnr.bus.messages import StepMetrics, ValidationMetrics
    from dcnr.client.answers import (
        BestStep,
        Checkpoint,
        ClusterInfo,
        HostedVNode,
        Link,
        NetworkDetails,
        NetworkInfo,
        PNodeDetails,
        PNodeInfo,
        Registered,
        SessionDetails,
        SessionInfo,
        SessionState,
    )
    from dcnr.client.cluster import Cluster, NetworkFile, TrainOptions
    from dcnr.client.connect import connect
    from dcnr.client.follow import End, Log, Note
    from dcnr.client.generation import GenerateOptions
    from dcnr.client.session import Session
    from dcnr.errors import DcnrError

_HOMES = {
    "dcnr.bus.messages": ("StepMetrics", "ValidationMetrics"),
    "dcnr.client.answers": (
        "BestStep",
        "Checkpoint",
        "ClusterInfo",
        "HostedVNode",
        "Link",
        "NetworkDetails",
        "NetworkInfo",
        "PNodeDetails",
        "PNodeInfo",
        "Registered",
        "SessionDetails",
        "SessionInfo",
        "SessionState",
    ),
    "dcnr.client.cluster": ("Cluster", "NetworkFile", "TrainOptions"),
    "dcnr.client.connect": ("connect",),
    "dcnr.client.follow": ("End", "Log", "Note"),
    "dcnr.client.generation": ("GenerateOptions",),
    "dcnr.client.session": ("Session",),
    "dcnr.errors": ("DcnrError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BestStep",
    "Checkpoint",
    "Cluster",
    "ClusterInfo",
    "DcnrError",
    "End",
    "GenerateOptions",
    "HostedVNode",
    "Link",
    "Log",
    "NetworkDetails",
    "NetworkFile",
    "NetworkInfo",
    "Note",
    "PNodeDetails",
    "PNodeInfo",
    "Registered",
    "Session",
    "SessionDetails",
    "SessionInfo",
    "SessionState",
    "StepMetrics",
    "TrainOptions",
    "ValidationMetrics",
    "connect",
]


if not TYPE_CHECKING:  # a type checker knows the names, and is to find those that are none

    def __getattr__(name: str) -> object:
        """Import a public name when it is asked for."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'dcnr' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_HOME_OF[name]), name)

    def __dir__() -> list[str]:
        """For shells that complete names."""
        return sorted({*globals(), *__all__})

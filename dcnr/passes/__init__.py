"""Pure rewrites of the graph before placement. Everyone runs the same passes over the same file, so no rewritten graph ever travels.

`ALWAYS` give the network its meaning; `FUSING` make the work large and can be switched off. Checkpoints never see the difference:
`Parameter.parts` names the rows of a merged array after the nodes of the file.
"""

from __future__ import annotations

from collections.abc import Callable

from dcnr.network.graph import Graph
from dcnr.network.verify import verify
from dcnr.passes.fuse_elementwise import fuse_elementwise
from dcnr.passes.fuse_heads import fuse_heads
from dcnr.passes.fuse_lm_head import fuse_lm_head
from dcnr.passes.fuse_residual import fuse_residual
from dcnr.passes.precision import precision
from dcnr.passes.tie_weights import tie_weights
from dcnr.passes.training_graph import training_graph

Pass = Callable[[Graph], Graph]

ALWAYS: tuple[Pass, ...] = (training_graph, precision, tie_weights)
FUSING: tuple[Pass, ...] = (fuse_heads, fuse_lm_head, fuse_elementwise, fuse_residual)
PASSES = ALWAYS + FUSING


def prepare(graph: Graph, fuse: bool) -> Graph:
    """The graph that is placed and run. Raises `InvariantError` if a pass broke it."""
    for rewrite in PASSES if fuse else ALWAYS:
        graph = rewrite(graph)
        verify(graph)
    return graph

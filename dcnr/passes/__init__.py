"""Pure rewrites of the graph before placement. Everyone runs the same passes over the same file, so no rewritten graph ever travels.

`ALWAYS` give the network its meaning; `FUSING` make the work large and can be switched off. Checkpoints never see the difference:
`Parameter.parts` names the rows of a merged array after the nodes of the file. To train and to generate begin with different parts of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dcnr.network.graph import Graph
from dcnr.network.verify import verify
from dcnr.passes.fuse_elementwise import fuse_elementwise
from dcnr.passes.fuse_heads import fuse_heads
from dcnr.passes.fuse_lm_head import fuse_lm_head
from dcnr.passes.fuse_residual import fuse_residual
from dcnr.passes.generation_graph import generation_graph
from dcnr.passes.precision import precision
from dcnr.passes.tie_weights import tie_weights
from dcnr.passes.training_graph import training_graph

Pass = Callable[[Graph], Graph]
Purpose = Literal["train", "generate"]

ALWAYS: tuple[Pass, ...] = (training_graph, precision, tie_weights)
FUSING: tuple[Pass, ...] = (fuse_heads, fuse_lm_head, fuse_elementwise, fuse_residual)
PASSES = ALWAYS + FUSING
GENERATING: tuple[Pass, ...] = (generation_graph, precision, tie_weights)


def prepare(graph: Graph, fuse: bool, purpose: Purpose = "train") -> Graph:
    """The graph that is placed and run. Raises `UserError` where it cannot generate, `InvariantError` if a pass broke it."""
    always = ALWAYS if purpose == "train" else GENERATING
    for rewrite in always + FUSING if fuse else always:
        graph = rewrite(graph)
        verify(graph)
    return graph

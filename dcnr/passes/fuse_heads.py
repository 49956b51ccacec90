"""Attention heads that read one broadcast and fill one stack become one attention: one product to q, k and v, one softmax kernel.

It asks for heads with the same config, a broadcast that they and nothing else read, and a stack over the last axis that holds just them;
their order there is their order in the merged weight. Anything else is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcnr.network.graph import Graph, GraphNode
from dcnr.nodes.attention import AttentionHeadConfig, FusedHeadsConfig
from dcnr.nodes.structure import StackConfig
from dcnr.passes.rewrite import Merge, input_of, is_declared, merge, only_reader, ports_of, same_place, same_storage, ties


def fuse_heads(graph: Graph) -> Graph:
    """`graph` with every such group merged into a `fused_heads`."""
    found = (_members(graph, stack) for stack in graph.nodes if stack.type == "stack")
    return merge(graph, [_merge(members) for members in found if members is not None])


def _merge(members: Sequence[GraphNode]) -> Merge:
    broadcast, *heads, _ = members
    configs = [head.config for head in heads if isinstance(head.config, AttentionHeadConfig)]
    return Merge(members, "fused_heads", FusedHeadsConfig.fuse(configs), [input_of(broadcast, 0)], heads[0])


def _members(graph: Graph, stack: GraphNode) -> list[GraphNode] | None:
    """Broadcast, heads and `stack`, if they may be merged."""
    heads = [graph.by_id[port.node] for port in stack.inputs if port is not None]
    if any(head.type != "attention_head" for head in heads) or len({head.id for head in heads}) != len(heads):
        return None
    sources = {head.inputs[0].node for head in heads if head.inputs[0] is not None}
    broadcast = graph.by_id[min(sources)]
    members = [broadcast, *heads, stack]
    fits = (
        len(sources) == 1
        and broadcast.type == "broadcast"
        and _joins_last_axis(stack)
        and _readers(graph, broadcast) == {head.id for head in heads}
        and all(only_reader(graph, head) is not None for head in heads)
        and all(head.config == heads[0].config and head.param_precision == heads[0].param_precision for head in heads)
        and not ties(graph, heads)
        and not any(is_declared(graph, node) for node in members[:-1])
        and same_storage(members)
        and same_place(members)
    )
    return members if fits else None


def _joins_last_axis(stack: GraphNode) -> bool:
    return isinstance(stack.config, StackConfig) and stack.config.axis in (-1, len(stack.output_shapes[0]) - 1)


def _readers(graph: Graph, broadcast: GraphNode) -> set[str]:
    return {reader.node for port in ports_of(broadcast) for reader in graph.consumers.get(port, ())}

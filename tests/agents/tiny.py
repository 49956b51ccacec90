"""A small transformer with everything that makes routing hard (broadcasts, residuals, heads, a tie, dropout), and its deploys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from dcnr.agents.plan import Plan, make_plan
from dcnr.bus.messages import Deploy, PNodeInfo, SavedPart
from dcnr.ids import Epoch, NetworkId, NodeId, PNodeId, SessionId
from dcnr.network.graph import Graph
from dcnr.network.load import load_graph
from dcnr.optim.decide import ScalerState
from dcnr.passes import prepare
from dcnr.storage.checkpoint import Manifest

NETWORK = NetworkId("tiny")
SESSION = SessionId("run")
VOCABULARY, SEQ, DIM = 17, 5, 8
A, B, C = PNodeId("a"), PNodeId("b"), PNodeId("c")

TINY = """
name: tiny
nodes:
  - {id: embedder, type: embedder, config: {vocab_size: 17, dim: 8, seq_len: 5, position_encoding: none,
     shared_weight_alias: tokens, colocate_group: tokens, colocate_policy: required}}
  - {id: in_broadcast, type: broadcast, config: {num_outputs: 2}}
  - {id: ln1, type: layernorm, config: {dim: 8}}
  - {id: to_heads, type: broadcast, config: {num_outputs: 2}}
  - {id: head_0, type: attention_head, config: {head_dim: 4, input_dim: 8, seq_len: 5, position_encoding: rope}}
  - {id: head_1, type: attention_head, config: {head_dim: 4, input_dim: 8, seq_len: 5, position_encoding: rope}}
  - {id: stack, type: stack, config: {axis: -1}}
  - {id: drop, type: dropout, config: {rate: 0.2}}
  - {id: residual, type: add, config: {}}
  - {id: up, type: linear, config: {in_dim: 8, out_dim: 16}}
  - {id: gelu, type: gelu, config: {}}
  - {id: down, type: linear, config: {in_dim: 16, out_dim: 8}}
  - {id: residual_2, type: add, config: {}}
  - {id: lm_head, type: linear, config: {in_dim: 8, out_dim: 17, bias: false,
     tie_weight_alias: tokens, colocate_group: tokens, colocate_policy: required}}
  - {id: loss, type: cost, config: {cost_function: ce_logits, vocab_size: 17}}
edges:
  - {from: embedder, to: in_broadcast}
  - {from: in_broadcast, to: ln1}
  - {from: ln1, to: to_heads}
  - {from: to_heads, from_slot: 0, to: head_0}
  - {from: to_heads, from_slot: 1, to: head_1}
  - {from: head_0, to: stack, to_slot: 0}
  - {from: head_1, to: stack, to_slot: 1}
  - {from: stack, to: drop}
  - {from: drop, to: residual, to_slot: 0}
  - {from: in_broadcast, from_slot: 1, to: residual, to_slot: 1}
  - {from: residual, to: up}
  - {from: up, to: gelu}
  - {from: gelu, to: down}
  - {from: down, to: residual_2, to_slot: 0}
  - {from: residual, to: residual_2, to_slot: 1}
  - {from: residual_2, to: lm_head}
  - {from: lm_head, to: loss}
costs: [{name: ce, node_id: loss}]
"""
NORMED = (
    TINY.replace("  - {id: up,", "  - {id: ln2, type: layernorm, config: {dim: 8}}\n  - {id: up,")
    .replace("  - {id: lm_head,", "  - {id: final_ln, type: layernorm, config: {dim: 8}}\n  - {id: lm_head,")
    .replace("  - {from: residual, to: up}", "  - {from: residual, to: ln2}\n  - {from: ln2, to: up}")
    .replace("  - {from: residual_2, to: lm_head}", "  - {from: residual_2, to: final_ln}\n  - {from: final_ln, to: lm_head}")
)
"""The same, with both residual sums normalised: fusion merges each with its branch and its norm."""


def in_groups(text: str, recompute: bool) -> str:
    """`text` (TINY, or a variant) with its two halves as groups, which run again before their backward if `recompute`."""
    halves = {"first": ("in_broadcast", "ln1", "to_heads", "head_0", "head_1", "stack", "drop", "residual"),
              "second": ("up", "gelu", "down", "residual_2")}  # fmt: skip
    for group, names in halves.items():
        keys = f"colocate_group: {group}" + (", recompute: true" if recompute else "")
        for name in names:
            before, found, rest = text.partition(f"{{id: {name}, ")
            head, config, tail = rest.partition("config: {")
            text = f"{before}{found}{head}{config}{keys}{'' if tail.startswith('}') else ', '}{tail}"
    return text


def graph_of(text: str = TINY, fuse: bool = False) -> Graph:
    """The prepared graph."""
    return prepare(load_graph(text, "tiny.yml"), fuse)


def spread(graph: Graph, pnodes: Sequence[PNodeId]) -> dict[NodeId, PNodeId]:
    """Nodes in as many runs of equal length as there are PNodes; what is tied stays with its owner."""
    size = -(-len(graph.nodes) // len(pnodes))
    homes = {node.id: pnodes[index // size] for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.tied_to is not None:
            homes[node.id] = homes[node.tied_to]
    return homes


def alternate(graph: Graph, pnodes: Sequence[PNodeId]) -> dict[NodeId, PNodeId]:
    """Neighbours on different PNodes: as many segments and borders as can be."""
    homes = {node.id: pnodes[index % len(pnodes)] for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.tied_to is not None:
            homes[node.id] = homes[node.tied_to]
    return homes


def deploy_of(
    homes: Mapping[NodeId, PNodeId],
    *,
    text: str = TINY,
    fuse: bool = False,
    batch: int = 6,
    micro_batches: int = 2,
    hyper: Mapping[str, str | int | float | bool | None] | None = None,
    scaler: ScalerState | None = None,
    epoch: int = 1,
    step: int = 0,
    peers: tuple[PNodeInfo, ...] = (),
    storage: str = "",
    checkpoint: str | None = None,
) -> Deploy:
    """A deploy of `text`; it decides for itself if one PNode holds everything."""
    return Deploy(
        network=NETWORK,
        session=SESSION,
        epoch=Epoch(epoch),
        network_file=text,
        fuse=fuse,
        assignment={str(node): pnode for node, pnode in homes.items()},
        peers=peers,
        hyper=dict(hyper or {"lr": 0.01}),
        state={**asdict(scaler or ScalerState())},
        seed=7,
        total_steps=100,
        micro_batches=micro_batches,
        batch=batch,
        step=step,
        storage=storage,
        checkpoint=checkpoint,
        decides=len(set(homes.values())) == 1,
    )


def alone(**options: object) -> tuple[Deploy, Plan]:
    """The whole network on PNode `a`: its deploy and plan."""
    fuse = bool(options.get("fuse", False))
    homes = {node.id: A for node in graph_of(fuse=fuse).nodes}
    deploy = deploy_of(homes, **options)  # type: ignore[arg-type]  # the options of deploy_of
    return deploy, make_plan(deploy, A)


def manifest_of(deploy: Deploy, parts: Iterable[SavedPart], step: int, state: ScalerState) -> Manifest:
    """What an orchestrator would write of these parts."""
    return Manifest(
        session=deploy.session,
        network=deploy.network,
        network_file=deploy.network_file,
        dataset="none",
        step=step,
        epoch=deploy.epoch,
        seed=deploy.seed,
        total_steps=deploy.total_steps,
        batch=deploy.batch,
        micro_batches=deploy.micro_batches,
        fuse=deploy.fuse,
        hyper=deploy.hyper,
        state=state,
        parts=tuple(parts),
        kernel="test",
        created="2000-01-01T00:00:00+00:00",
        dcnr_version="0",
    )

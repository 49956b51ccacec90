"""A picture as SVG, laid out here so that nothing needs to be installed.

Boxes stand in layers, sources on top (a layer is the longest path from a source); within a layer they stand where their sources do.
An arrow to the next layer is a curve; a longer one, a residual, runs in a lane to the right of everything it passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dcnr.ids import NodeId
from dcnr.network.picture import Arrow, Box, Picture

CHARACTER = 7.3
"""Width of a character of the 12 px monospace font."""
PADDING, BOX_HEIGHT, LAYER_HEIGHT, GAP, LANE, MARGIN = 14.0, 42.0, 70.0, 22.0, 16.0, 28.0

_FAMILIES: Mapping[str, str] = {
    "embedder": "#c7ddf7", "tokenizer": "#dde3ea", "detokenizer": "#dde3ea",
    "linear": "#cdeccf", "linear_activation": "#cdeccf", "layernorm": "#f7e9b8", "residual_norm": "#f7e9b8",
    "attention_head": "#f5cfd6", "attention": "#f5cfd6", "fused_heads": "#f5cfd6",
    "relu": "#e3d6f5", "gelu": "#e3d6f5", "silu": "#e3d6f5", "swiglu": "#e3d6f5", "dropout": "#ece7df", "dropout_add": "#ece7df",
    "cost": "#f9d3b4", "tied_lm_head_ce": "#f9d3b4", "fused_lm_head": "#f9d3b4",
}  # fmt: skip
_OTHER = "#ffffff"

_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;text-anchor:middle;fill:#1d2733}"
    ".id{font-weight:600}.type{font-size:10.5px;fill:#55606e}.frame{fill:#f6f8fa;stroke:#aeb9c6;stroke-dasharray:5 4}"
    ".label{text-anchor:start;fill:#55606e}.box{stroke:#8a96a5}.arrow{fill:none;stroke:#8a96a5;stroke-width:1.4;marker-end:url(#tip)}"
)
_TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#8a96a5"/></marker>'
)


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a box stands: its centre, its layer and half its width."""

    x: float
    y: float
    layer: int
    half: float


def to_svg(picture: Picture, title: str) -> str:
    """An SVG document."""
    spots = _lay_out(picture)
    lanes = _lanes(picture, spots)
    frames = [_frame(label, [box for box in picture.boxes if box.frame == name], spots, lanes) for name, label in picture.frames.items()]
    reach = [spot.x + spot.half for spot in spots.values()] + [x for _, x in [*lanes.values(), *frames]]
    right = max(reach, default=0.0) + MARGIN
    bottom = max((spot.y for spot in spots.values()), default=0.0) + BOX_HEIGHT / 2 + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0f}" height="{bottom:.0f}" viewBox="0 0 {right:.0f} {bottom:.0f}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style><defs>{_TIP}</defs>",
        f'<rect width="{right:.0f}" height="{bottom:.0f}" fill="#ffffff"/>',
        *(frame for frame, _ in frames),
        *(f'<path class="arrow" d="{path}"/>' for path, _ in lanes.values()),
        *(_draw_box(box, spots[box.id]) for box in picture.boxes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lay_out(picture: Picture) -> dict[NodeId, _Spot]:
    sources: dict[NodeId, list[NodeId]] = {box.id: [] for box in picture.boxes}
    for arrow in picture.arrows:
        sources[arrow.target].append(arrow.source)
    layer: dict[NodeId, int] = {}
    layers: dict[int, list[Box]] = {}
    for box in picture.boxes:
        layer[box.id] = max((layer[source] + 1 for source in sources[box.id] if source in layer), default=0)
        layers.setdefault(layer[box.id], []).append(box)
    half = {box.id: max(len(box.title), len(box.subtitle)) * CHARACTER / 2 + PADDING for box in picture.boxes}
    x: dict[NodeId, float] = {}
    for row in layers.values():
        wanted = {box.id: _mean([x[source] for source in sources[box.id] if source in x]) for box in row}
        x.update(_spread(sorted(row, key=lambda box: wanted[box.id]), wanted, half))
    left = min((x[name] - half[name] for name in x), default=0.0)
    return {
        name: _Spot(x[name] - left + MARGIN * 1.5, layer[name] * LAYER_HEIGHT + BOX_HEIGHT / 2 + MARGIN * 1.5, layer[name], half[name])
        for name in x
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(row: Sequence[Box], wanted: Mapping[NodeId, float], half: Mapping[NodeId, float]) -> dict[NodeId, float]:
    """Centres of a layer's boxes: side by side, their middle where their sources' middle is."""
    width = sum(2 * half[box.id] for box in row) + GAP * (len(row) - 1)
    at = _mean([wanted[box.id] for box in row]) - width / 2
    found = {}
    for box in row:
        found[box.id] = at + half[box.id]
        at += 2 * half[box.id] + GAP
    return found


def _lanes(picture: Picture, spots: Mapping[NodeId, _Spot]) -> dict[Arrow, tuple[str, float]]:
    """(path, rightmost x) of every arrow."""
    taken: list[tuple[int, int, float]] = []
    found: dict[Arrow, tuple[str, float]] = {}
    for arrow in sorted(picture.arrows, key=lambda arrow: spots[arrow.target].layer - spots[arrow.source].layer):
        source, target = spots[arrow.source], spots[arrow.target]
        if target.layer - source.layer <= 1:
            top, end = source.y + BOX_HEIGHT / 2, target.y - BOX_HEIGHT / 2
            bend = (top + end) / 2
            path = f"M{source.x:.1f} {top:.1f}C{source.x:.1f} {bend:.1f} {target.x:.1f} {bend:.1f} {target.x:.1f} {end:.1f}"
            found[arrow] = (path, max(source.x, target.x))
            continue
        passed = [spot.x + spot.half for spot in spots.values() if source.layer <= spot.layer <= target.layer]
        inner = [x for low, high, x in taken if low < target.layer and source.layer < high]
        lane = max(passed + inner) + LANE
        taken.append((source.layer, target.layer, lane))
        start, end = source.x + source.half, target.x + target.half
        found[arrow] = (
            f"M{start:.1f} {source.y:.1f}H{lane - 8:.1f}Q{lane:.1f} {source.y:.1f} {lane:.1f} {source.y + 8:.1f}"
            f"V{target.y - 8:.1f}Q{lane:.1f} {target.y:.1f} {lane - 8:.1f} {target.y:.1f}H{end:.1f}",
            lane,
        )
    return found


def _frame(label: str, boxes: Sequence[Box], spots: Mapping[NodeId, _Spot], lanes: Mapping[Arrow, tuple[str, float]]) -> tuple[str, float]:
    """(a frame with its label on its right, rightmost x)."""
    inside = [spots[box.id] for box in boxes]
    names = {box.id for box in boxes}
    left = min(spot.x - spot.half for spot in inside) - MARGIN / 2
    lane_ends = [x for arrow, (_, x) in lanes.items() if arrow.source in names and arrow.target in names]
    right = max([spot.x + spot.half for spot in inside] + lane_ends) + MARGIN / 2
    top = min(spot.y for spot in inside) - BOX_HEIGHT / 2 - 10
    bottom = max(spot.y for spot in inside) + BOX_HEIGHT / 2 + 10
    drawn = (
        f'<rect class="frame" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" rx="10"/>'
        f'<text class="label" x="{right + 10:.1f}" y="{(top + bottom) / 2:.1f}">{escape(label)}</text>'
    )
    return drawn, right + 10 + len(label) * CHARACTER


def _draw_box(box: Box, spot: _Spot) -> str:
    fill = _FAMILIES.get(box.type, _OTHER)
    return (
        f"<g><title>{escape(', '.join(box.nodes))}</title>"
        f'<rect class="box" x="{spot.x - spot.half:.1f}" y="{spot.y - BOX_HEIGHT / 2:.1f}" width="{2 * spot.half:.1f}" '
        f'height="{BOX_HEIGHT:.1f}" rx="7" fill="{fill}"/>'
        f'<text class="id" x="{spot.x:.1f}" y="{spot.y - 3:.1f}">{escape(box.title)}</text>'
        f'<text class="type" x="{spot.x:.1f}" y="{spot.y + 13:.1f}">{escape(box.subtitle)}</text></g>'
    )

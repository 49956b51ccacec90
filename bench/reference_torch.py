"""The benchmark networks as a person would write them in plain PyTorch: eager, float32, on the CPU.

    python bench/reference_torch.py shakespeare_char_cpu --steps 100
    python bench/reference_torch.py topology_1 --steps 10

Prints one JSON line: the median step time and what was run. The work is that of the DCNR network of the same name:
same layers, optimizer, clipping and dropout, on random ids.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WARM_UP = 5


@dataclass(frozen=True)
class Shape:
    """Sizes of one network. `rope` and the SwiGLU head belong to the production topologies."""

    layers: int
    heads: int
    dim: int
    vocabulary: int
    seq: int
    batch: int
    bias: bool
    rope: bool
    dropout: float
    clip_norm: float


SHAPES = {
    "shakespeare_char_cpu": Shape(4, 4, 128, 65, 64, 12, bias=False, rope=False, dropout=0.0, clip_norm=1.0),
    "topology_1": Shape(6, 8, 512, 10_000, 128, 4, bias=True, rope=True, dropout=0.1, clip_norm=0.0),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs; x is [B, H, T, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, bias = shape.dim, shape.bias
        self.shape = shape
        self.ln1, self.ln2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
        self.qkv, self.projection = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        s = self.shape
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, s.heads, d // s.heads).permute(2, 0, 3, 1, 4)
        if s.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.projection(o.transpose(1, 2).reshape(b, t, d)), s.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), s.dropout, self.training)


class Net(nn.Module):
    """Embedding, blocks, (SwiGLU head,) tied output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = None if shape.rope else nn.Embedding(shape.seq, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim, bias=shape.bias)
        self.head_up = nn.Linear(shape.dim, 8 * shape.dim) if shape.rope else None
        self.head_down = nn.Linear(4 * shape.dim, shape.dim) if shape.rope else None
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        head = shape.dim // shape.heads
        angles = torch.outer(torch.arange(shape.seq).float(), 1.0 / 10_000 ** (torch.arange(0, head, 2).float() / head))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of [B, T] ids."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        elif self.shape.dropout:
            x = F.dropout(x, self.shape.dropout, self.training)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        if self.head_up is not None and self.head_down is not None:
            value, gate = self.head_up(x).chunk(2, -1)
            x = self.head_down(value * F.silu(gate))
        return F.cross_entropy((x @ self.tokens.weight.T).view(-1, self.shape.vocabulary), targets.reshape(-1))


def step_times(shape: Shape, steps: int) -> list[float]:
    """Milliseconds of `steps` training steps after the warm-up."""
    torch.manual_seed(1)
    net = Net(shape)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    data = torch.randint(0, shape.vocabulary, (8, shape.batch, shape.seq + 1))
    times = []
    for step in range(WARM_UP + steps):
        ids = data[step % len(data)]
        start = time.perf_counter()
        loss = net(ids[:, :-1], ids[:, 1:])
        loss.backward()
        if shape.clip_norm:
            nn.utils.clip_grad_norm_(net.parameters(), shape.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append((time.perf_counter() - start) * 1e3)
    return times[WARM_UP:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    times = step_times(SHAPES[args.network], args.steps)
    result = {
        "network": args.network,
        "step_ms": round(statistics.median(times), 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

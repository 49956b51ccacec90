"""The production topologies and the character model as a person would train them in plain PyTorch on one GPU.

    python bench/reference_torch_gpu.py 2 [--mode compile|eager] [--precision fp16|bf16|fp32] [--batch 128]

Autocast, fused optimizer, PyTorch's own attention, loss scaling in fp16: network, optimizer and dropout of the file of the same name
(but for the dropout behind the embedding that topology 1 has there). Weights and the residual stream are fp32, as autocast keeps them.
Without a GPU it runs on the CPU. Waits for its turns (`turns`); `ceiling` is the fastest product of this device, sustained.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from turns import Fields, measure, take_turns

BATCHES = 4
WARM_UP = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CEILING_SECONDS = 1.0 if DEVICE == "cuda" else 0.1
CEILING_SIZE = 8192 if DEVICE == "cuda" else 512
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Sizes of one network. A production topology has RoPE, biases and a SwiGLU layer before its output; a character model has
    learned positions, no biases, and dropout behind the embedding."""

    layers: int
    heads: int
    dim: int
    vocabulary: int
    seq: int
    batch: int
    production: bool
    dropout: float
    precision: str

    @property
    def head_dim(self) -> int:
        """Of one head."""
        return self.dim // self.heads


SHAPES = {
    "1": Shape(6, 8, 512, 10_000, 128, 128, production=True, dropout=0.1, precision="fp16"),
    "2": Shape(8, 8, 512, 32_768, 512, 128, production=True, dropout=0.1, precision="fp16"),
    "shakespeare": Shape(6, 6, 384, 65, 256, 64, production=False, dropout=0.2, precision="bf16"),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs; x is [B, H, T, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, bias = shape.dim, shape.production
        self.shape = shape
        self.ln1, self.ln2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
        self.qkv, self.projection = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.shape.heads, self.shape.head_dim).permute(2, 0, 3, 1, 4)
        if self.shape.production:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.projection(o.transpose(1, 2).reshape(b, t, d)), self.shape.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), self.shape.dropout, self.training)


class Net(nn.Module):
    """Embedding, blocks, (SwiGLU layer,) tied output, cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.positions = None if shape.production else nn.Embedding(shape.seq, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim, bias=shape.production)
        self.head_up = nn.Linear(shape.dim, 8 * shape.dim) if shape.production else None
        self.head_down = nn.Linear(4 * shape.dim, shape.dim) if shape.production else None
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("projection.weight", "down.weight")) and name.startswith("blocks")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if ends_branch else 0.02)

    def forward(self, ids: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mean cross-entropy of [B, T] ids."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = F.dropout(x + self.positions.weight[: ids.shape[1]], self.shape.dropout, self.training)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        if self.head_up is not None and self.head_down is not None:
            value, gate = self.head_up(x).chunk(2, -1)
            x = self.head_down(value * F.silu(gate))
        logits = F.linear(x, self.tokens.weight.to(x.dtype))
        return F.cross_entropy(logits.view(-1, self.shape.vocabulary).float(), targets.reshape(-1))


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    """Adam, or, for the character model, AdamW that decays matrices only."""
    fused = DEVICE == "cuda"
    if net.shape.production:
        return torch.optim.Adam(net.parameters(), lr=3e-4, fused=fused)
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=fused)


def steps_of(shape: Shape, compiled: bool) -> Callable[[], Tensor]:
    """A function that runs the next step and gives its loss, without waiting for the GPU."""
    torch.manual_seed(0)
    dtype = DTYPES[shape.precision]
    net = Net(shape).to(DEVICE)
    optimizer = optimizer_of(net)
    scaler = torch.amp.GradScaler(DEVICE, enabled=shape.precision == "fp16" and DEVICE == "cuda")
    loss_of = torch.compile(net) if compiled else net
    angles = torch.outer(torch.arange(shape.seq).float(), 1e4 ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    data = torch.randint(0, shape.vocabulary, (BATCHES, shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    count = 0

    def run() -> Tensor:
        nonlocal count
        count += 1
        ids = data[count % BATCHES]
        with torch.autocast(DEVICE, dtype=dtype, enabled=shape.precision != "fp32"):
            loss: Tensor = loss_of(ids[:, :-1], ids[:, 1:].contiguous(), cos, sin)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # so in torch
        if not shape.production:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return run


def ceiling(dtype: torch.dtype) -> float:
    """FLOP/s of one large square product, repeated for `CEILING_SECONDS`, so that a card at its power limit shows its sustained rate."""
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=DEVICE, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b, out=out)
    synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < CEILING_SECONDS:
        for _ in range(20):
            torch.mm(a, b, out=out)
        synchronize()
        count += 20
    return count * 2.0 * CEILING_SIZE**3 / (time.perf_counter() - start)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=sorted(SHAPES))
    parser.add_argument("--mode", choices=("compile", "eager"), default="compile")
    parser.add_argument("--precision", choices=sorted(DTYPES))
    parser.add_argument("--batch", type=int)
    args = parser.parse_args()
    found = SHAPES[args.network]
    shape = Shape(**{**vars(found), "precision": args.precision or found.precision, "batch": args.batch or found.batch})
    peak_rate = ceiling(DTYPES[shape.precision])
    run = steps_of(shape, args.mode == "compile")
    for _ in range(WARM_UP):
        run()
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def turn(steps: int) -> Fields:
        median, back_to_back = measure(run, synchronize, steps)
        return {"median_ms": median, "ms": back_to_back, "peak": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None}

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    take_turns({"device": name, "torch": torch.__version__, "ceiling": peak_rate}, turn)


if __name__ == "__main__":
    main()

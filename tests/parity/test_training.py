"""Training through the whole product gives the losses of an outside implementation of the same network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcnr.data.dataset import Dataset

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
F = torch.nn.functional

Tensor = Any
Params = Mapping[str, Tensor]

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, SEED = 50, 8, 7
HEADS, BLOCKS = 4, 2
RELATIVE = 1e-4
HYPER = {"optimizer": "adamw", "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 1.0}


def dcnr(*arguments: str) -> str:
    """Standard output of one command that must succeed."""
    done = subprocess.run([sys.executable, "-m", "dcnr.cli.main", *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def linear(p: Params, x: Tensor, node: str, kind: str = "") -> Tensor:
    """x w^T (+ b)."""
    return F.linear(x, p[f"{node}.{kind}weight"], p.get(f"{node}.{kind}bias"))


def norm(p: Params, x: Tensor, node: str) -> Tensor:
    """Layer normalisation."""
    return F.layer_norm(x, x.shape[-1:], p[f"{node}.weight"], p[f"{node}.bias"])


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, theta 10000."""
    t, d = x.shape[-2:]
    angle = torch.outer(torch.arange(t).double(), 10_000.0 ** (-torch.arange(0, d, 2).double() / d))
    cos, sin = angle.cos().float(), angle.sin().float()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def head(p: Params, x: Tensor, node: str) -> Tensor:
    """One rotary causal head: [B, T, D] -> [B, T, head_dim]."""
    q, k, v = (linear(p, x, node, f"{kind}_") for kind in "qkv")
    return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)


def plain_loss(p: Params, ids: Tensor, targets: Tensor) -> Tensor:
    """networks/tiny.yml as a person writes it in PyTorch: mean cross-entropy."""
    x = p["embedder.weight"][ids]
    for b in range(BLOCKS):
        h = norm(p, x, f"block_{b}_ln1")
        heads = torch.cat([head(p, h, f"block_{b}_head_{i}") for i in range(HEADS)], -1)
        x = x + linear(p, heads, f"block_{b}_output_proj")
        h = F.gelu(linear(p, norm(p, x, f"block_{b}_ln2"), f"block_{b}_ffn_up"))
        x = x + linear(p, h, f"block_{b}_ffn_down")
    logits = norm(p, x, "final_ln") @ p["embedder.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_losses(weights: Mapping[str, Tensor], batch_of: Callable[[int], np.ndarray]) -> list[float]:
    """Train from `weights` on the same batches."""
    p = {name: value.clone().requires_grad_() for name, value in weights.items()}
    groups = [
        {"params": [v for v in p.values() if v.dim() > 1], "weight_decay": HYPER["weight_decay"]},
        {"params": [v for v in p.values() if v.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=HYPER["lr"], betas=(HYPER["beta1"], HYPER["beta2"]))
    losses = []
    for step in range(1, STEPS + 1):
        ids = torch.from_numpy(batch_of(step))
        loss = plain_loss(p, ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), HYPER["clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(300)
def test_every_loss_of_fifty_steps_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    """tiny.yml over two agents, exported at step 0 and trained in PyTorch on the same batches: 50 losses within 1e-4 relative."""
    data_dir = ("--data-dir", str(tmp_path / "data"))
    text = tmp_path / "text.txt"
    text.write_text("".join(p.read_text() for p in sorted((ROOT / "dcnr").rglob("*.py"))))
    dcnr("tokenizer", "train", "parity", str(text), "--vocab-size", "1024", *data_dir)
    dcnr("dataset", "create", "parity", str(text), "--tokenizer", "parity", "--seq-len", "64", *data_dir)
    run = ("--steps", str(STEPS), "--batch", str(BATCH), "--micro-batches", "2", "--seed", str(SEED), "--session", "parity")
    settings = [f"--set={key}={value}" for key, value in HYPER.items()]
    file = str(ROOT / "networks/tiny.yml")
    lines = dcnr("train", file, "--dataset", "parity", *run, *settings, "--local", "2", "--json", *data_dir)
    ours = [row["loss"] for row in map(json.loads, lines.splitlines()) if row["event"] == "step"]
    dcnr("checkpoint", "export", "parity@0", str(tmp_path / "exported"), *data_dir)

    dataset = Dataset.open(tmp_path / "data", "parity")
    plain = plain_losses(
        safetensors_torch.load_file(tmp_path / "exported" / "model.safetensors"), lambda step: dataset.batch("train", SEED, step, BATCH, 64)
    )
    assert len(ours) == STEPS
    np.testing.assert_allclose(ours, plain, rtol=RELATIVE)

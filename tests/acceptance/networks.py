"""A small transformer with everything that fusion looks for, dropout, a tied LM head, and parts for eight agents."""

from __future__ import annotations

from tests.network.files import Network

VOCABULARY, DIM, SEQ = 64, 16, 8


def small(name: str, precision: str) -> str:
    """The file of a network of two blocks, one with gelu and one with swiglu."""
    net = Network(head=[f"name: {name}", f"precision: {precision}"])
    here = net.add("embedder", "embedder", vocab_size=VOCABULARY, dim=DIM, seq_len=SEQ, shared_weight_alias="tokens")
    here = net.add("embedding_dropout", "dropout", here, rate=0.1)
    here = _block(net, "a", here, "gelu")
    here = _block(net, "b", here, "swiglu")
    here = net.add("final_ln", "layernorm", here, dim=DIM)
    here = net.add("lm_head", "linear", here, in_dim=DIM, out_dim=VOCABULARY, bias="false", tie_weight_alias="tokens")
    net.add("loss", "cost", here, cost_function="ce_logits", vocab_size=VOCABULARY, cost_precision="float32")
    return net.text


def _block(net: Network, name: str, here: str, activation: str) -> str:
    """Two rotary heads and a feed-forward part, each with dropout before its residual."""
    fan = net.add(f"{name}_in", "broadcast", here, num_outputs=2)
    normed = net.add(f"{name}_ln1", "layernorm", f"{fan}:0", dim=DIM)
    heads = net.add(f"{name}_to_heads", "broadcast", normed, num_outputs=2)
    config = {"input_dim": DIM, "head_dim": DIM // 2, "seq_len": SEQ, "position_encoding": "rope"}
    both = [net.add(f"{name}_head_{i}", "attention_head", f"{heads}:{i}", **config) for i in range(2)]
    attended = net.add(f"{name}_proj", "linear", net.add(f"{name}_stack", "stack", *both, axis=-1), in_dim=DIM, out_dim=DIM)
    mixed = net.add(f"{name}_add1", "add", net.add(f"{name}_dropout1", "dropout", attended, rate=0.1), f"{fan}:1")
    wide = net.add(f"{name}_up", "linear", net.add(f"{name}_ln2", "layernorm", mixed, dim=DIM), in_dim=DIM, out_dim=4 * DIM)
    active = net.add(f"{name}_{activation}", activation, wide)
    down = net.add(f"{name}_down", "linear", active, in_dim=2 * DIM if activation == "swiglu" else 4 * DIM, out_dim=DIM)
    return net.add(f"{name}_add2", "add", net.add(f"{name}_dropout2", "dropout", down, rate=0.1), mixed)

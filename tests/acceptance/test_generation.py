"""Text with real processes: the same on 1 and 3 agents, with the key/value cache and without it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from dcnr.text.tokenizer import Tokenizer
from tests.acceptance.networks import SEQ, small
from tests.acceptance.running import PATIENCE, Cluster, register, train
from tests.cli.conftest import command, environment

pytestmark = [pytest.mark.nats, pytest.mark.timeout(150)]

TOKENS = 40
COLD = ("--temperature", "0", "--max-tokens", str(TOKENS), "--json")


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> Cluster:
    """With session `speaks`, checkpoints 10 and 20."""
    hyper = {"lr": 0.01, "checkpoint_every": 10, "keep_last": 5}

    async def work() -> None:
        await register(cluster.url, small("speaks", "float32"))
        await train(cluster.url, "speaks", network="speaks", steps=20, batch=8, seed=5, hyper=hyper, pnodes=2)

    asyncio.run(work())
    return cluster


def test_the_text_depends_neither_on_the_placement_nor_on_the_cache(trained: Cluster) -> None:
    """Temperature 0, within the window and far beyond it; a token costs one position while the cache serves."""
    said = {
        (pnodes, cache): json.loads(trained.dcnr("generate", "speaks", "--prompt", "li", *COLD, "--pnodes", pnodes, *cache))
        for pnodes in "13"
        for cache in ((), ("--no-cache",))
    }
    assert len({one["text"] for one in said.values()}) == 1, said
    assert {one["tokens"] for one in said.values()} == {TOKENS}
    within = ("generate", "speaks", "--prompt", "li", "--temperature", "0", "--max-tokens", str(SEQ - 2), "--json")
    assert json.loads(trained.dcnr(*within))["positions"] == SEQ - 1
    assert json.loads(trained.dcnr(*within, "--no-cache"))["positions"] == sum(range(2, SEQ))


def test_the_text_is_that_of_plain_pytorch(trained: Cluster, tmp_path: Path) -> None:
    """Loaded from what an export holds, on 1 and 3 agents, with the cache and without; within the window and far beyond it."""
    pytest.importorskip("torch")
    from tests.parity.torch_export import load

    trained.dcnr("checkpoint", "export", "speaks", str(tmp_path / "exported"))
    tokenizer, plain = Tokenizer.load(tmp_path / "exported" / "tokenizer.json"), load(tmp_path / "exported")
    ids = tokenizer.encode("li")
    for _ in range(TOKENS):
        ids.append(int(plain.logits(ids[-SEQ:])[-1, : tokenizer.vocab_size].argmax()))
    wanted = tokenizer.decode(ids)
    for arguments in (("--pnodes", "1"), ("--pnodes", "3"), ("--pnodes", "3", "--no-cache")):
        said = json.loads(trained.dcnr("generate", "speaks", "--prompt", "li", *COLD, *arguments))
        assert "li" + said["text"] == wanted, arguments


def test_a_seed_gives_its_text_again_and_a_step_its_own(trained: Cluster) -> None:
    """Warm, streamed to the terminal behind its prompt."""
    warm = ("generate", "speaks@10", "--prompt", "line 7", "--max-tokens", "30", "--top-p", "0.95", "--top-k", "20")
    first = trained.dcnr(*warm, "--seed", "3")
    assert first.startswith("line 7")
    assert trained.dcnr(*warm, "--seed", "3") == first
    assert trained.dcnr(*warm, "--seed", "4") != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "nobody", "--prompt", "a"), "no session 'nobody'"),
        (("generate", "speaks@7", "--prompt", "a"), "no checkpoint of step 7"),
        (("generate", "speaks", "--prompt", "€"), "the tokenizer does not know '€' (U+20AC)"),
        (("chat", "nobody"), "no session 'nobody'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_said_in_words(trained: Cluster, arguments: tuple[str, ...], said: str) -> None:
    """With exit code 2, and nothing on stdout but what came before."""
    env = environment(trained.data_dir, NATS_URL=trained.url)
    done = subprocess.run(
        command(*arguments), env=env, input="hi\n", capture_output=True, text=True, timeout=PATIENCE, check=False
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_goes_on_with_all_that_was_said(trained: Cluster) -> None:
    """Line by line, until an empty one; its second turn is what `generate` says of the whole text."""
    env = environment(trained.data_dir, NATS_URL=trained.url)
    options = ("--temperature", "0", "--max-tokens", "12")
    lines = ("line 7: the", "line 8: the")
    chat = subprocess.run(
        command("chat", "speaks", *options), env=env, input="\n".join([*lines, "", ""]), capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert chat.returncode == 0, chat.stderr
    text = ""
    for line, answer in zip(lines, chat.stdout.split("\n"), strict=False):
        text += f"{line}\n"
        assert trained.dcnr("generate", "speaks", "--prompt", text, *options, "--stop", "\n") == f"{text}{answer}\n"
        text += f"{answer}\n"

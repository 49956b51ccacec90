"""The verbs of text: what is refused, in which words, and what `next` says of a request that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dcnr.backends.numpy.backend import NumpyBackend
from dcnr.bus.memory import MemoryBroker
from dcnr.errors import NotFound, UserError
from dcnr.ids import SessionId
from dcnr.orchestrator import generation
from dcnr.orchestrator.generation import News, Tongue
from dcnr.storage.checkpoint import read_manifest
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer
from tests.agents.tiny import TINY
from tests.integration.scripted import agents, info_of
from tests.orchestrator.running import User, make_data, orchestrator, user

RUN: dict[str, Any] = {"network": "tiny", "dataset": "text", "steps": 2, "batch": 2, "seed": 3, "session": "s"}


@asynccontextmanager
async def trained(data_dir: Path, file: str = TINY, seed: int = 3) -> AsyncIterator[User]:
    """A session that was trained a little, by an agent that is gone now."""
    make_data(data_dir)
    broker = MemoryBroker()
    async with orchestrator(broker, data_dir), user(broker) as one:
        async with agents(broker, NumpyBackend(), [info_of("a")]):
            await one.ask("session.create", file=file, **{**RUN, "seed": seed})
            await one.until_state("done")
        yield one


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"session": "nobody"}, NotFound, "no session 'nobody'"),
        ({"session": "no body"}, UserError, "session"),
        ({"step": 7}, NotFound, r"no checkpoint of step 7 in .*steps: 0, 2"),
        ({"prompt": ""}, UserError, "the prompt is empty"),
        ({"prompt": "ab?"}, UserError, r"does not know '\?'"),
        ({"temperature": -1}, UserError, "generate: 'temperature'"),
        ({"temperature": float("nan")}, UserError, "generate: 'temperature'"),
        ({"top_p": 0}, UserError, "generate: 'top_p'"),
        ({"max_tokens": 0}, UserError, "generate: 'max_tokens'"),
        ({"stop": [""]}, UserError, "generate: 'stop"),
        ({"words": 3}, UserError, "generate: 'words'"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_is_said(tmp_path: Path, fields: dict[str, Any], error: type[UserError], said: str) -> None:
    """Before anything is deployed."""
    async with trained(tmp_path) as one:
        with pytest.raises(error, match=said):
            await one.ask("generate", **{"session": "s", "prompt": "ab", **fields})


async def test_a_request_that_waits_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And can be stopped; what is not known any more is said too."""
    monkeypatch.setattr(generation, "WAIT", 0.05)
    async with trained(tmp_path) as one:
        begun = await one.ask("generate", session="s", prompt="ab")
        assert (begun["session"], begun["step"]) == ("s", 2)
        told = await one.ask("generate.next", request=begun["request"])
        assert (told["text"], told["done"]) == ("", False)
        assert "0 can take work" in told["waits"]
        await one.ask("generate.stop", request=begun["request"])
        told = await one.ask("generate.next", request=begun["request"])
        assert (told["done"], told["reason"], told["failed"]) == (True, "stopped", False)
        with pytest.raises(NotFound, match="no request 'x'"):
            await one.ask("generate.next", request="x")


async def test_a_name_that_is_trained_again_is_read_anew(tmp_path: Path) -> None:
    """Its old weights may still be deployed under the name of the reading, for a minute."""
    names = []
    for seed in (3, 4):
        async with trained(tmp_path / str(seed), seed=seed):
            manifest = await read_manifest(FileStorage(tmp_path / str(seed)), SessionId("s"))
            names.append(generation.source_of(manifest, 0).name)
    assert manifest.key == "checkpoints/s/0000000002/manifest.json"
    assert len(set(names)) == 2


async def test_a_network_that_mixes_positions_is_refused_by_its_node(tmp_path: Path) -> None:
    """It trains all the same."""
    file = TINY.replace("head_dim: 4, input_dim", "causal: false, head_dim: 4, input_dim")
    async with trained(tmp_path, file) as one:
        with pytest.raises(UserError, match=r"node 'head_0' \(attention_head\): its attention is not causal"):
            await one.ask("generate", session="s", prompt="ab")


def test_a_stop_text_is_found_wherever_tokens_cut_it(make: Callable[[str], Tokenizer]) -> None:
    """Also in the middle of one."""
    tokenizer = make("so it ends here, and here it ends. the end of it")
    tongue = Tongue(tokenizer, ("ends h", "\n\n"))
    ids = tokenizer.encode("so it ends here")
    first = next(count for count in range(len(ids) + 1) if tongue.ended(ids[:count]))
    assert "ends h" in tokenizer.decode(ids[:first])
    assert "ends h" not in tokenizer.decode(ids[: first - 1])
    assert not Tongue(tokenizer, ()).ended(ids)


def test_a_text_ends_with_its_document(tmp_path: Path) -> None:
    """Where the tokenizer has a token for that; it is not shown."""
    (tmp_path / "text.txt").write_text("so it ends here")
    tokenizer = Tokenizer.train([tmp_path / "text.txt"], "char", special=("<|endoftext|>",))
    tongue, ids = Tongue(tokenizer, ()), tokenizer.encode("so it ends")
    assert tokenizer.end_id is not None
    assert [tongue.ended(ids), tongue.ended([*ids, tokenizer.end_id])] == [False, True]
    assert tongue.said([*ids, tokenizer.end_id], True) == tongue.said(ids, True) == "so it ends"


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Tokenizer]:
    """A tokenizer of a text."""

    def trained_on(text: str) -> Tokenizer:
        (tmp_path / "text.txt").write_text(text)
        return Tokenizer.train([tmp_path / "text.txt"], "bpe", 280)

    return trained_on


async def test_news_wake_all_who_wait() -> None:
    """And whoever waits in vain goes on after its time."""
    news = News()
    waiting = [asyncio.create_task(news.wait(30)) for _ in range(3)]
    await asyncio.sleep(0)
    news.tell()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
        await news.wait(0.01)

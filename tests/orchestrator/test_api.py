"""Every verb, over the bus, as a user asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dcnr.bus.memory import MemoryBroker
from dcnr.bus.messages import StepMetrics, ValidationMetrics
from dcnr.data.dataset import Dataset
from dcnr.data.manifest import delete_dataset
from dcnr.errors import AlreadyExists, NotFound, UserError
from dcnr.ids import SessionId
from dcnr.metrics.history import History, Validations
from dcnr.storage.export import export_folder, import_folder, read_folder
from dcnr.storage.file import FileStorage
from dcnr.text.tokenizer import Tokenizer, add_tokenizer
from tests.orchestrator.fakes import NETWORK
from tests.orchestrator.running import User, fake_agents, make_data, orchestrator, user
from tests.storage.exports import save_network

RUN: dict[str, Any] = {"network": "small", "dataset": "text", "steps": 3, "batch": 4, "micro_batches": 2, "session": "s"}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with dataset `text`, vocabulary 5, windows of 4."""
    make_data(tmp_path)
    return tmp_path


@pytest.fixture
def broker() -> MemoryBroker:
    """A server that allows small messages only."""
    return MemoryBroker(max_payload=64 << 10)


@pytest.fixture
async def one(broker: MemoryBroker, data_dir: Path) -> AsyncIterator[User]:
    """A user of a cluster without PNodes that knows network `small`."""
    async with orchestrator(broker, data_dir), user(broker) as asked:
        await asked.ask("network.create", file=NETWORK, file_name="small.yml")
        yield asked


async def refused(one: User, verb: str, kind: type[UserError] = UserError, **fields: Any) -> str:
    """The error of a request, in words."""
    with pytest.raises(kind) as caught:
        await one.ask(verb, **fields)
    return str(caught.value)


async def test_cluster_info_says_who_leads_and_where_things_are(one: User, data_dir: Path) -> None:
    """Version, leader, storage, PNodes that are present."""
    info = await one.ask("cluster.info")
    assert info == {"version": info["version"], "orchestrator": "orchestrator", "storage": f"file://{data_dir}", "pnodes": 0}


async def test_a_network_is_created_listed_shown_replaced_and_deleted(one: User) -> None:
    """5 VNodes; parameters by hand: 11*8 + 8*8+8 + 11*8+11."""
    parameters = 11 * 8 + 8 * 8 + 8 + 11 * 8 + 11
    row = {"name": "small", "vnodes": 5, "parameters": parameters, "revision": 1}
    assert await one.ask("network.list") == {"networks": [row]}
    assert await one.ask("network.show", name="small") == {**row, "file": NETWORK, "file_name": "small.yml"}
    assert "exists" in await refused(one, "network.create", AlreadyExists, file=NETWORK)
    created = await one.ask("network.create", file=NETWORK, replace=True)
    assert created == {"name": "small", "vnodes": 5, "parameters": parameters}
    assert (await one.ask("network.list"))["networks"][0]["revision"] == 2
    assert await one.ask("network.delete", name="small") == {"name": "small"}
    assert await one.ask("network.list") == {"networks": []}


async def test_a_broken_network_file_is_refused_with_every_problem_and_its_place(one: User) -> None:
    """And is not registered."""
    broken = NETWORK.replace("name: small", "name: broken").replace("type: relu", "type: rulu").replace("to: head}", "to: haed}")
    told = await refused(one, "network.create", file=broken, file_name="broken.yml")
    assert "broken.yml:6:" in told
    assert "haed" in told
    assert [row["name"] for row in (await one.ask("network.list"))["networks"]] == ["small"]


async def test_what_does_not_exist_is_named(one: User) -> None:
    """Network, dataset, session, PNode."""
    assert "no network 'nix'" in await refused(one, "session.create", NotFound, **{**RUN, "network": "nix"})
    assert "nix" in await refused(one, "session.create", NotFound, **{**RUN, "dataset": "nix"})
    for verb in ("session.show", "session.start", "session.suspend", "session.rebalance", "session.resume", "session.delete"):
        assert "no session 'nix'" in await refused(one, verb, NotFound, session="nix")
    for verb in ("pnode.show", "pnode.drain"):
        assert "'nix'" in await refused(one, verb, NotFound, pnode="nix")
    for verb in ("network.show", "network.delete"):
        assert "no network 'nix'" in await refused(one, verb, NotFound, name="nix")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch": 5}, "a batch of 5 cannot be cut into 2 equal micro-batches"),
        ({"steps": 0}, "'steps'"),
        ({"seed": -1}, "'seed'"),
        ({"colour": "red"}, "'colour'"),
        ({"session": "a.b"}, "'a.b' is not a valid session name"),
        ({"hyper": {"learning_rate": 1}}, "unknown hyper-parameter 'learning_rate'"),
        ({"hyper": {"warmup_step": 1}}, "did you mean 'warmup_steps'?"),
        ({"hyper": {"lr": "fast"}}, "hyper-parameter 'lr'"),
        ({"hyper": {"schedule": "sometimes"}}, "'constant', 'cosine' or 'linear'"),
    ],
)
async def test_a_session_that_makes_no_sense_is_refused_with_one_sentence(one: User, change: dict[str, Any], told: str) -> None:
    """Nothing is created."""
    assert told in await refused(one, "session.create", **{**RUN, **change})
    assert await one.ask("session.list") == {"sessions": []}


async def test_a_vocabulary_that_is_too_small_is_refused_with_both_numbers(one: User) -> None:
    """The node is named."""
    tight = NETWORK.replace("name: small", "name: tight").replace('"11"', '"3"')
    await one.ask("network.create", file=tight)
    told = await refused(one, "session.create", **{**RUN, "network": "tight"})
    assert "dataset 'text' has a vocabulary of 5, node 'embed' of network 'tight' of 3" in told


async def test_a_dataset_that_is_too_short_is_refused(one: User) -> None:
    """A window is one token longer than the sequence."""
    long = NETWORK.replace("name: small", "name: long").replace('seq_len: "4"', 'seq_len: "4000"')
    await one.ask("network.create", file=long)
    assert "4001" in await refused(one, "session.create", **{**RUN, "network": "long"})


async def test_a_session_may_bring_its_network(one: User) -> None:
    """Both are made; with a session that is refused, or under another name, neither is."""
    mine = {**RUN, "network": "mine", "file": NETWORK.replace("name: small", "name: mine"), "file_name": "mine.yml"}
    assert "nix" in await refused(one, "session.create", NotFound, **{**mine, "dataset": "nix"})
    assert "mine.yml holds network 'mine', not 'small'" in await refused(one, "session.create", **{**mine, "network": "small"})
    assert [row["name"] for row in (await one.ask("network.list"))["networks"]] == ["small"]
    assert await one.ask("session.create", **mine) == {"session": "s"}
    assert (await one.ask("network.show", name="mine"))["file_name"] == "mine.yml"
    assert (await one.ask("session.show", session="s"))["network"] == "mine"
    unnamed = {key: value for key, value in mine.items() if key != "network"} | {"session": "t"}
    assert await one.ask("session.create", **unnamed) == {"session": "t"}
    assert (await one.ask("session.show", session="t"))["network"] == "mine"


async def test_a_session_waits_for_pnodes_and_says_so(one: User) -> None:
    """Its row and its details."""
    assert await one.ask("session.create", **RUN) == {"session": "s"}
    (row,) = (await one.ask("session.list"))["sessions"]
    assert (row["state"], row["step"], row["steps"], row["loss"]) == ("waiting", 0, 3, None)
    assert "dcnr-agent" in row["reason"]
    shown = await one.ask("session.show", session="s")
    assert (shown["assignment"], shown["checkpoints"], shown["epoch"], shown["hyper"]["lr"]) == ({}, [], 0, 3e-4)
    assert await one.ask("session.suspend", session="s") == {"session": "s", "state": "suspended"}
    assert await one.ask("session.delete", session="s") == {"session": "s", "state": "deleted"}
    assert await one.ask("session.list") == {"sessions": []}


async def test_names_are_made_up_and_never_taken_twice(one: User, data_dir: Path) -> None:
    """Also not from a session whose checkpoints are still there."""
    unnamed = {key: value for key, value in RUN.items() if key != "session"}
    (data_dir / "checkpoints" / "small-2" / "0000000000").mkdir(parents=True)
    (data_dir / "checkpoints" / "small-2" / "0000000000" / "manifest.json").write_text("{}")
    made = [(await one.ask("session.create", **unnamed))["session"] for _ in range(2)]
    assert made == ["small-1", "small-3"]
    assert "earlier session 'small-2'" in await refused(one, "session.create", AlreadyExists, **{**RUN, "session": "small-2"})
    assert "exists" in await refused(one, "session.create", AlreadyExists, **{**RUN, "session": "small-1"})


async def test_a_session_trains_through_the_api(one: User, broker: MemoryBroker) -> None:
    """Created at rest, started, done; resumed for more; every number is shown."""
    async with fake_agents(broker, "a", "b"):
        await one.ask("session.create", **RUN, start=False)
        assert (await one.ask("session.show", session="s"))["state"] == "created"
        await one.ask("session.start", session="s")
        await one.until_state("done")
        assert [row.step for row in one.steps] == [1, 2, 3]
        shown = await one.ask("session.show", session="s")
        assert (shown["state"], shown["step"], shown["loss"]) == ("done", 3, one.steps[-1].loss)
        assert "was started before" in await refused(one, "session.start", session="s")
        assert "ask for more steps" in await refused(one, "session.resume", session="s")
        await one.ask("session.resume", session="s", steps=5)
        await one.until(lambda: len(one.steps) == 5)
        await one.until_state("done")
        assert (await one.ask("session.show", session="s"))["checkpoints"] == [0, 3, 5]


async def test_rows_of_a_session_are_shown(one: User, broker: MemoryBroker) -> None:
    """Those that were asked for, as they were published; of steps to come nothing is known."""
    async with fake_agents(broker, "a"):
        await one.ask("session.create", **RUN)
        await one.until_state("done")
        published = [asdict(row) for row in one.steps]
        assert (await one.ask("session.rows", session="s", first=1, last=100))["rows"] == published
        assert (await one.ask("session.rows", session="s", first=2, last=2))["rows"] == published[1:2]
        assert (await one.ask("session.rows", session="s", first=4, last=9))["rows"] == []
        assert (await one.ask("session.rows", session="s", first=1, last=9, every=2))["rows"] == published[1:2]
        assert "'first'" in await refused(one, "session.rows", session="s", first=0, last=9)


async def test_the_validations_of_a_session_are_shown_and_one_that_cannot_be_is_refused(one: User, broker: MemoryBroker) -> None:
    """1. they are in a log of their own; 2. the best of them is shown; 3. settings that mean nothing without them are refused."""
    assert "mean nothing without validations" in await refused(one, "session.create", **{**RUN, "hyper": {"patience": 3}})
    async with fake_agents(broker, "a", "b"):
        await one.ask("session.create", **{**RUN, "steps": 6, "hyper": {"validate_every": 4, "validate_batches": 1}})
        await one.until_state("done")
        rows = (await one.ask("session.rows", session="s", first=1, last=100))["validations"]
        assert [(row["step"], row["best"]) for row in rows] == [(4, True), (6, False)]
        assert (await one.ask("session.rows", session="s", first=5, last=6))["validations"] == rows[1:]
        assert (await one.ask("session.show", session="s"))["best"] == {"step": 4, "loss": rows[0]["loss"]}
        assert (await one.ask("session.show", session="s"))["kept"] == 4
        assert len((await one.ask("session.rows", session="s", first=1, last=100))["rows"]) == 6


async def test_a_log_in_pages_leaves_no_validation_out(one: User, data_dir: Path) -> None:
    """A page ends where there are as many as fit of rows or of validations, and the next begins after it."""
    await one.ask("session.create", **RUN, start=False)
    name = SessionId("s")
    History(data_dir).append([StepMetrics(name, step, 2.0, 0.1, 1.0, 1.0, False, 1.0, 1.0) for step in range(1, 1001)])
    Validations(data_dir).append([ValidationMetrics(name, step, 2.0, 7.4, 1.0, 8, False) for step in range(2, 1001, 2)])
    first = await one.ask("session.rows", session="s", first=1, last=1000, every=300)
    assert [row["step"] for row in first["rows"]] == [300]
    assert [row["step"] for row in first["validations"]] == list(range(2, 402, 2))
    second = await one.ask("session.rows", session="s", first=401, last=1000)
    assert [row["step"] for row in second["rows"]] == list(range(401, 601))
    assert [row["step"] for row in second["validations"]] == list(range(402, 602, 2))


async def test_a_running_session_is_divided_anew_when_asked(one: User, broker: MemoryBroker) -> None:
    """1. at rest it cannot be; 2. nor where nothing would change; 3. a PNode that joined gets a part, and no step is lost."""
    await one.ask("session.create", **RUN, start=False)
    assert "only a running one" in await refused(one, "session.rebalance", session="s")
    await one.ask("session.delete", session="s")
    async with fake_agents(broker, "a") as pnodes:
        await one.ask("session.create", **{**RUN, "steps": 100_000, "hyper": {"checkpoint_every": 0}})
        await one.until(lambda: len(one.steps) > 2)
        assert "would stay as it is" in await refused(one, "session.rebalance", session="s")
        async with fake_agents(broker, "b", beside=pnodes):
            async with asyncio.timeout(20):
                while [row["state"] for row in (await one.ask("pnode.list"))["pnodes"]].count("alive") < 2:
                    await asyncio.sleep(0.01)
            assert await one.ask("session.rebalance", session="s") == {"session": "s", "state": "running"}
            await one.until(lambda: [state.state for state in one.states[-3:]] == ["waiting", "deploying", "running"])
            assert set((await one.ask("session.show", session="s"))["assignment"].values()) == {"a", "b"}
            before = len(one.steps)
            await one.until(lambda: len(one.steps) > before + 5)
            assert [row.step for row in one.steps] == list(range(1, len(one.steps) + 1))
            await one.ask("session.suspend", session="s")
            await one.until_state("suspended")


async def test_a_deleted_session_leaves_nothing_behind(one: User, broker: MemoryBroker, data_dir: Path) -> None:
    """Neither checkpoints nor history; the name is free again."""
    async with fake_agents(broker, "a"):
        await one.ask("session.create", **RUN)
        await one.until_state("done")
        assert (data_dir / "checkpoints" / "s").is_dir()
        await one.ask("session.delete", session="s")
        assert not (data_dir / "checkpoints" / "s").exists()
        assert not (data_dir / "history" / "s.jsonl").exists()
        await one.ask("session.create", **RUN)
        await one.until_state("done")


async def test_a_deleted_session_whose_files_stay_is_told_of(one: User, data_dir: Path) -> None:
    """A folder stands where its history should be; the session is gone all the same."""
    await one.ask("session.create", **RUN, start=False)
    (data_dir / "history" / "s.jsonl").mkdir(parents=True)
    assert "remove them by hand" in await refused(one, "session.delete", session="s")
    assert await one.ask("session.list") == {"sessions": []}


async def test_pnodes_are_listed_and_shown_with_their_vnodes(one: User, broker: MemoryBroker) -> None:
    """By their heartbeats, and by the assignment."""
    async with fake_agents(broker, "a", "b"):
        await one.ask("session.create", **{**RUN, "steps": 100_000})
        await one.until(lambda: len(one.steps) > 2)
        rows = (await one.ask("pnode.list"))["pnodes"]
        assert [(row["pnode"], row["state"], row["backend"], row["cores"]) for row in rows] == [
            ("a", "alive", "numpy", 1),
            ("b", "alive", "numpy", 1),
        ]
        nodes = [(await one.ask("pnode.show", pnode=name))["nodes"]["s"] for name in "ab"]
        assert sorted(nodes[0] + nodes[1]) == ["act", "embed", "loss"]
        await one.ask("session.suspend", session="s")
        await one.until_state("suspended")


async def test_a_drained_pnode_is_emptied_and_the_session_goes_on(one: User, broker: MemoryBroker) -> None:
    """On the other one, without being suspended."""
    async with fake_agents(broker, "a", "b"):
        await one.ask("session.create", **{**RUN, "steps": 100_000})
        await one.until(lambda: len(one.steps) > 2)
        assert (await one.ask("pnode.drain", pnode="b"))["reason"] == "draining"
        before = len(one.steps)
        await one.until(lambda: [state.state for state in one.states[-3:]] == ["waiting", "deploying", "running"])
        await one.until(lambda: len(one.steps) > before + 5)
        assert set((await one.ask("session.show", session="s"))["assignment"].values()) == {"a"}
        assert [row.step for row in one.steps] == list(range(1, len(one.steps) + 1))
        await one.ask("session.suspend", session="s")
        await one.until_state("suspended")


async def imported(data_dir: Path, **request: str) -> dict[str, Any]:
    """Step 5 of a session `origin` of the small network, trained on `text`, exported, and put into the storage as a checkpoint of `s`.

    Returns what the verb `session.import` is asked.
    """
    origin = FileStorage(data_dir / "origin")
    await save_network(origin, SessionId("origin"), NETWORK, 5, dataset="text")
    await export_folder(origin, data_dir, SessionId("origin"), None, data_dir / "exported")
    await import_folder(FileStorage(data_dir), read_folder(data_dir / "exported"), SessionId("s"))
    return {"session": "s", **request}


async def test_an_imported_session_is_at_rest_and_trains_on(one: User, broker: MemoryBroker, data_dir: Path) -> None:
    """1. suspended at its step; 2. known to the next leader too; 3. resumed from its checkpoint, the rest as with any session; 4. deleted,
    nothing of it is left."""
    told = "imported; to train on: dcnr session resume s --steps N"
    answer = await one.ask("session.import", **await imported(data_dir))
    assert answer == {"session": "s", "state": "suspended", "step": 5, "dataset": "text", "reason": told}
    async with fake_agents(broker, "a"):
        shown = await one.ask("session.show", session="s")
        assert [shown[key] for key in ("state", "step", "steps", "batch", "micro_batches", "seed", "checkpoints")] == [
            "suspended", 5, 100, 8, 2, 7, [5],
        ]  # fmt: skip
        assert shown["hyper"]["lr"] == 0.01
        assert "has done step 5 of 5" in await refused(one, "session.resume", session="s", steps=5)
        await one.ask("session.resume", session="s", steps=8)
        await one.until_state("done")
        assert [row.step for row in one.steps] == [6, 7, 8]
    await one.ask("session.delete", session="s")
    assert not (data_dir / "checkpoints" / "s").exists()


async def test_an_imported_session_outlives_its_orchestrator(broker: MemoryBroker, data_dir: Path) -> None:
    """The next one has it from the records."""
    async with orchestrator(broker, data_dir), user(broker) as first:
        await first.ask("session.import", **await imported(data_dir))
        before = await first.ask("session.show", session="s")
    async with orchestrator(broker, data_dir), user(broker) as second:
        assert await second.ask("session.show", session="s") == before


async def test_an_import_registers_its_network_only_under_a_free_name(one: User, data_dir: Path) -> None:
    """One of the same name stays as it is; the session has its own text anyway."""
    other = NETWORK.replace("type: relu", "type: gelu")
    await one.ask("network.create", file=other, replace=True)
    await one.ask("session.import", **await imported(data_dir))
    assert (await one.ask("network.show", name="small"))["file"] == other
    await one.ask("session.delete", session="s")
    await one.ask("network.delete", name="small")
    await import_folder(FileStorage(data_dir), read_folder(data_dir / "exported"), SessionId("s"))
    await one.ask("session.import", session="s")
    assert (await one.ask("network.show", name="small"))["file"] == NETWORK


async def test_an_import_that_makes_no_sense_is_refused(one: User, data_dir: Path) -> None:
    """Nothing in storage; a name that is taken, or is none."""
    assert "session 's' has no checkpoint in" in await refused(one, "session.import", NotFound, session="s")
    assert "not a valid session name" in await refused(one, "session.import", session="a.b")
    request = await imported(data_dir)
    await one.ask("session.import", **request)
    assert "session 's' exists" in await refused(one, "session.import", AlreadyExists, **request)


async def test_an_imported_session_trains_only_on_data_that_means_the_same(one: User, data_dir: Path) -> None:
    """A dataset of another tokenizer is refused if it is named, and else at the resume."""
    file = data_dir / "other.txt"
    file.write_text("efgh " * 40)
    add_tokenizer(data_dir, "others", Tokenizer.train([file], "char"))
    Dataset.create(data_dir, "other", [file], "others", seq_len=4)
    request = await imported(data_dir)
    told = await refused(one, "session.import", **request, dataset="other")
    assert "dataset 'other' was made with another tokenizer ('others') than the network" in told
    assert "nix" in await refused(one, "session.import", NotFound, **request, dataset="nix")
    assert await one.ask("session.list") == {"sessions": []}

    delete_dataset(data_dir, "text")
    Dataset.create(data_dir, "text", [file], "others", seq_len=4)
    answer = await one.ask("session.import", **request)
    assert "it cannot be trained on: dataset 'text' was made with another tokenizer" in answer["reason"]
    assert "was made with another tokenizer" in await refused(one, "session.resume", session="s", steps=10)
    assert (await one.ask("session.show", session="s"))["state"] == "suspended"

"""One checkpoint that is read: who gets which piece of which text, and that nothing that goes wrong changes a text."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dcnr.bus.messages import Hop
from dcnr.ids import PNodeId
from dcnr.orchestrator.events import AskedFor, Draining, LogitsRead, Lost, MakeRoom, Offered, StopGenerating, Tick
from dcnr.orchestrator.reading import IDLE, ReadingState
from dcnr.orchestrator.source import SLOTS
from tests.agents.tiny import SEQ, VOCABULARY
from tests.orchestrator.reader import Stage, ask, source, text_of


@pytest.mark.parametrize("caches", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("prompt", [(1,), (1, 2), tuple(range(SEQ)), tuple(range(1, SEQ + 4))], ids=len)
def test_the_text_is_that_of_the_language(prompt: tuple[int, ...], caches: bool) -> None:
    """With and without a cache, up to the window and beyond it."""
    stage = Stage("a")
    stage.play(ask(prompt=prompt, limit=2 * SEQ, caches=caches), stage.offered())
    request = stage.request()
    assert request.tokens == text_of(prompt, 2 * SEQ)
    assert (request.done, request.failed) == ("length", False)
    assert stage.news == ["r"] * 2 * SEQ


def test_a_token_costs_one_position_within_the_window() -> None:
    """Without a cache all of them."""
    counted = {}
    for caches in (True, False):
        stage = Stage("a")
        stage.play(ask(prompt=(1, 2), limit=3, caches=caches), stage.offered())
        counted[caches] = [len(ids) for _, ids in stage.hops]
        assert stage.request().positions == sum(counted[caches])
    assert counted == {True: [2, 1, 1], False: [2, 3, 4]}


def test_beyond_the_window_the_last_window_is_read_anew() -> None:
    """With a cache and without one alike."""
    stage = Stage("a")
    stage.play(ask(prompt=(1, 2), limit=2 * SEQ), stage.offered())
    beyond = [(hop.step, hop.caches, len(ids)) for hop, ids in stage.hops[SEQ - 1 :]]
    assert beyond == [(0, False, SEQ)] * len(beyond)
    assert len(beyond) > 2


def test_requests_take_turns_and_more_than_the_slots_wait() -> None:
    """Each gets its own text; a slot that becomes free goes to the next."""
    stage = Stage("a")
    names = [f"r{number}" for number in range(SLOTS + 2)]
    for number, name in enumerate(names):
        stage.give(ask(name, prompt=(number + 1,), limit=4))
    stage.play(stage.offered())
    assert {hop.micro for hop, _ in stage.hops} == set(range(SLOTS))
    first = [hop.micro for hop, _ in stage.hops[: 2 * SLOTS]]
    assert first == [*range(SLOTS), *range(SLOTS)]
    for number, name in enumerate(names):
        assert stage.request(name).tokens == text_of((number + 1,), 4)


def test_it_ends_where_it_is_told_to() -> None:
    """At a stop text, by request, and at no token more."""
    stage = Stage("a")
    wanted = text_of((1, 2), 8)
    stage.play(ask(ended=lambda ids: list(ids)[-2:] == wanted[2:4]), stage.offered())
    assert (stage.request().tokens, stage.request().done) == (wanted[:4], "stop")
    stage.lose = lambda hop: hop.step == 3
    stage.play(ask("other", limit=100))
    stage.play(StopGenerating(2, "other"))
    assert stage.request("other").done == "stopped"
    assert stage.give(StopGenerating(3, "other")) == []


def test_nothing_is_deployed_for_nobody() -> None:
    """And whoever comes before there are PNodes waits, and is told for what."""
    stage = Stage("a")
    assert stage.give(stage.offered()) == []
    stage.play(ask(), Offered(()))
    assert stage.reading.wants
    assert "0 can take work" in stage.reading.reason
    stage.play(stage.offered())
    assert stage.request().tokens == text_of((1, 2), 8)


def test_it_takes_as_few_pnodes_as_hold_it_or_as_many_as_are_asked_for() -> None:
    """Every border costs a token a hop."""
    stage = Stage("a", "b", "c")
    stage.play(ask(), stage.offered())
    assert len(set(stage.deploys[-1].assignment.values())) == 1
    wide = Stage("a", "b", "c", reads=source(pnodes=3))
    wide.play(ask(), wide.offered())
    assert len(set(wide.deploys[-1].assignment.values())) == 3
    few = Stage("a", reads=source(pnodes=2))
    few.play(ask(), few.offered())
    assert few.reading.reason.startswith("it needs 2 PNodes and 1 can take work")


def test_a_pnode_that_dies_changes_no_text() -> None:
    """A newer epoch, where its ids are read anew; who is left of the older one lets go."""
    stage = Stage("a", "b")
    stage.lose = lambda hop: hop.epoch == 1 and hop.step == 4
    stage.play(ask(limit=6), stage.offered())
    assert len(stage.request().tokens) == 3
    (host,) = set(stage.deploys[-1].assignment.values())
    stage.play(Lost(host, "it died"))
    assert stage.reading.state is ReadingState.WAITING
    stage.infos = tuple(one for one in stage.infos if one.pnode != host)
    stage.play(stage.offered())
    assert stage.deploys[-1].epoch > stage.deploys[0].epoch
    assert stage.request().tokens == text_of((1, 2), 6)
    late = stage.logits(stage.hops[0][0], 0)
    before = stage.reading.fenced
    stage.give(late)
    assert stage.reading.fenced == before + 1


def test_a_pnode_that_is_drained_is_left() -> None:
    """As if it had died, but for its letting go."""
    stage = Stage("a", "b")
    stage.lose = lambda hop: hop.epoch == 1 and hop.step == 3
    stage.play(ask(limit=6), stage.offered())
    (host,) = set(stage.deploys[-1].assignment.values())
    stage.play(Draining(host))
    assert [pnode for pnode, _ in stage.undeploys] == [host]
    stage.infos = tuple(one for one in stage.infos if one.pnode != host)
    stage.play(stage.offered())
    assert stage.request().tokens == text_of((1, 2), 6)


def test_a_lost_message_is_made_good_by_reading_anew() -> None:
    """When nobody has had anything to do for a while: as a new attempt, from position 0."""
    stage = Stage("a")
    lost: list[Hop] = []

    def lose(hop: Hop) -> bool:
        if hop.step != 3 or lost:
            return False
        lost.append(hop)
        return True

    stage.lose = lose
    stage.play(ask(limit=6), stage.offered())
    assert lost
    for _ in range(8):
        stage.now += 0.5
        stage.stand("a", work=3)
        stage.play(Tick())
    assert stage.request().tokens == text_of((1, 2), 6)
    assert {hop.attempt for hop, _ in stage.hops} >= {0, 1}


def test_logits_count_once() -> None:
    """Those that come twice, of another attempt, or of a wrong size change nothing."""
    stage = Stage("a")
    stage.lose = lambda hop: hop.step == 2
    stage.play(ask(), stage.offered())
    hop = stage.hops[-1][0]
    for wrong in (
        stage.logits(stage.hops[0][0], 1),
        LogitsRead(stage.logits(hop, 1).hop, np.zeros((1, VOCABULARY + 1), np.float32)),
    ):
        assert stage.give(wrong) == []
    assert len(stage.request().tokens) == 1


def test_logits_that_are_no_numbers_end_the_request_in_words() -> None:
    """Only that one."""
    stage = Stage("a")
    stage.lose = lambda _hop: True
    stage.play(ask(), ask("other"), stage.offered())
    hop = stage.hops[0][0]
    stage.play(LogitsRead(stage.logits(hop, 1).hop, np.full((1, VOCABULARY), np.nan, np.float32)))
    assert stage.request().failed
    assert "no numbers" in stage.request().done
    assert not stage.request("other").done


def test_what_breaks_in_a_node_is_said_to_everybody() -> None:
    """At once; the next request tries again."""
    stage = Stage("a")
    stage.lose = lambda _hop: True
    stage.play(ask(), stage.offered())
    stage.play(stage.failed("a", world=False))
    assert stage.request().failed
    assert "node 'up': it broke" in stage.request().done
    stage.lose = lambda _hop: False
    stage.play(ask("again"), stage.offered())
    assert stage.request("again").tokens == text_of((1, 2), 8)


def test_trouble_of_the_world_is_tried_again_elsewhere_three_times() -> None:
    """Then it is said."""
    stage = Stage("a", "b")
    stage.lose = lambda _hop: True
    stage.play(ask(), stage.offered())
    hosts = []
    for _ in range(4):
        (host,) = set(stage.deploys[-1].assignment.values())
        hosts.append(host)
        stage.play(stage.failed(host, world=True), stage.offered())
    assert hosts[0] != hosts[1]
    assert stage.request().failed


def pass_time(stage: Stage, seconds: float, busy: bool = False) -> None:
    """With heartbeats of whoever hosts it, questions about what is open, and the offers that follow."""
    until = stage.now + seconds
    while stage.now < until:
        stage.now += 0.5
        for host in stage.reading.hosts:
            stage.stand(host, work=3, busy=busy)
        stage.play(Tick(), *(AskedFor(name) for name in stage.reading.requests), stage.offered())


def test_a_standstill_that_no_deployment_ends_is_said_the_fourth_time() -> None:
    """Where every hop is lost, be it for ever."""
    stage = Stage("a")
    stage.lose = lambda _hop: True
    stage.play(ask(), stage.offered())
    pass_time(stage, 200)
    assert len(stage.deploys) == 4
    assert stage.request().failed
    assert stage.request().done == "the reading of s@3 stood still"


def test_a_host_that_does_nothing_is_left_and_in_the_end_given_up() -> None:
    """It says that it has work, and does none of it."""
    stage = Stage("a", "b")
    stage.lose = lambda _hop: True
    stage.play(ask(), stage.offered())
    pass_time(stage, 1300, busy=True)
    hosts = [next(iter(deploy.assignment.values())) for deploy in stage.deploys]
    assert hosts[0] != hosts[1]
    assert len(hosts) == 4
    assert "has work and did none of it" in stage.request().done


def test_a_lost_message_is_made_good_though_others_go_on() -> None:
    """They hide it from whoever looks for a standstill. Late is late: twice as long the second time."""
    stage = Stage("a")
    lost: list[float] = []

    def lose(hop: Hop) -> bool:
        if hop.micro == 0 and len(lost) < 2:
            lost.append(stage.now)
            return True
        return False

    stage.lose = lose
    stage.play(ask(limit=6), stage.offered())
    number = 0
    while not stage.request().done:
        number += 1
        stage.play(ask(f"other{number}", limit=2))
        assert stage.request(f"other{number}").done
        pass_time(stage, 1.0)
        assert stage.now < 200
    assert stage.request().tokens == text_of((1, 2), 6)
    assert [round(at / 45) for at in lost] == [0, 1]
    assert round(stage.now / 45) == 3
    assert len(stage.deploys) == 1


def test_a_checkpoint_that_cannot_be_read_is_said() -> None:
    """A refusal for another reason is tried elsewhere."""
    stage = Stage("a", "b")
    stage.give(ask(), stage.offered())
    deploy_epoch = stage.reading.newest_epoch
    (host,) = stage.reading.hosts
    stage.play(stage.refused(host, damaged=False), stage.offered())
    assert stage.reading.newest_epoch > deploy_epoch
    assert stage.request().tokens == text_of((1, 2), 8)
    other = Stage("a")
    other.give(ask(), other.offered())
    other.play(other.refused("a", damaged=True))
    assert "checkpoint s@3 cannot be read, says PNode a: no" in other.request().done


def test_a_deploy_is_said_again_until_it_is_answered() -> None:
    """Every 2 s."""
    stage = Stage("a")
    (first,) = stage.give(ask(), stage.offered())
    stage.now = 2.5
    assert stage.give(Tick()) == [first]


def test_it_lets_go_when_it_was_idle_for_a_minute() -> None:
    """Not before; a request that nobody asks about ends as well."""
    stage = Stage("a")
    stage.play(ask(), stage.offered())
    stage.now = IDLE - 1
    stage.stand("a", work=1)
    stage.play(AskedFor("r"), Tick())
    while stage.reading.deadline() is not None:
        assert stage.reading.uses(PNodeId("a"), stage.reading.newest_epoch)
        stage.now += 1
        stage.stand("a", work=1)
        stage.play(Tick())
    assert stage.now == 2 * IDLE - 1
    assert [pnode for pnode, _ in stage.undeploys] == ["a"]
    assert stage.reading.deadline() is None
    left = Stage("a")
    left.lose = lambda _hop: True
    left.give(ask(limit=100), Offered(()))
    left.now = IDLE
    left.play(Tick())
    assert "nobody asked" in left.request().done


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_text_is_the_right_one(seed: int) -> None:
    """Lost hops, deaths, drains, stops and time, in any order."""
    chance = random.Random(seed)
    stage = Stage("a", "b", "c", reads=source(pnodes=chance.randrange(3)))
    stage.lose = lambda _hop: chance.random() < 0.2
    prompts = {f"r{number}": [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 8))] for number in range(6)}
    for name, prompt in prompts.items():
        stage.play(ask(name, prompt=tuple(prompt), limit=chance.randrange(1, 12), caches=chance.random() < 0.7))
    for _ in range(300):
        stage.now += 0.25
        match chance.randrange(12):
            case 0:
                stage.play(Lost(PNodeId(chance.choice("abc")), "it died"))
            case 1:
                stage.play(Draining(PNodeId(chance.choice("abc"))))
            case 2:
                stage.play(stage.offered())
            case _:
                for host in stage.reading.hosts:
                    stage.stand(host, work=len(stage.hops))
        stage.play(Tick(), *(AskedFor(name) for name in prompts))
    for name, prompt in prompts.items():
        request = stage.request(name)
        assert request.tokens == text_of(prompt, len(request.tokens)), f"seed {seed}"
        assert request.done == "length", f"seed {seed}: {request}"


def test_it_waits_for_no_pnode_that_is_not_a_host() -> None:
    """Deaths elsewhere are none of its business."""
    stage = Stage("a", "b")
    stage.lose = lambda hop: hop.step == 2
    stage.play(ask(), stage.offered())
    (host,) = set(stage.deploys[-1].assignment.values())
    other = next(one.pnode for one in stage.infos if one.pnode != host)
    assert stage.give(Lost(other, "it died")) == []
    assert stage.reading.uses(host, stage.reading.newest_epoch)
    assert not stage.reading.uses(other, stage.reading.newest_epoch)


def test_it_makes_room_when_nobody_wants_anything_of_it() -> None:
    """What it has said stays known, and the next request deploys it again."""
    stage = Stage("a")
    stage.lose = lambda hop: hop.step == 4
    stage.play(ask(limit=5), stage.offered(), MakeRoom())
    assert stage.undeploys == []
    stage.play(StopGenerating(2, "r"), MakeRoom(), MakeRoom())
    assert [pnode for pnode, _ in stage.undeploys] == ["a"]
    assert stage.request().tokens == text_of((1, 2), 3)
    stage.play(ask("again", prompt=(1,), limit=3), stage.offered())
    assert stage.request("again").tokens == text_of((1,), 3)


def test_a_request_that_has_ended_is_forgotten_though_others_go_on() -> None:
    """A minute after it was last asked about."""
    stage = Stage("a")
    stage.play(ask("short", limit=1), stage.offered())
    stage.now = IDLE - 1
    stage.play(ask("long", limit=1))
    assert set(stage.reading.requests) == {"short", "long"}
    stage.now = IDLE
    stage.play(Tick())
    assert set(stage.reading.requests) == {"long"}

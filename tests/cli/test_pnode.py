"""`dcnr pnode` shows a real cluster's agents."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cluster

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]


def test_list_has_every_agent(cluster: Cluster) -> None:
    """Alive, with backend and memory; people get a table of the same."""
    rows = cluster.json("pnode", "list")["pnodes"]
    assert [(row["pnode"], row["state"], row["backend"]) for row in rows] == [("agent-1", "alive", "numpy"), ("agent-2", "alive", "numpy")]
    assert all(row["memory_total"] > 0 for row in rows)
    assert "agent-2" in cluster.dcnr("pnode", "list").output


def test_show_has_one_agent(cluster: Cluster) -> None:
    """The row, and what it hosts."""
    assert cluster.json("pnode", "show", "agent-1")["pnode"] == "agent-1"


@pytest.mark.parametrize("verb", ["show", "drain"])
def test_an_unknown_agent_is_code_2(cluster: Cluster, verb: str) -> None:
    """It is named."""
    assert "nobody" in cluster.dcnr("pnode", verb, "nobody", code=2).output

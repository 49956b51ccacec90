"""`dcnr network`: files are checked and analyzed with nothing running; a cluster keeps them whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dcnr.cli.main import main
from dcnr.network.draw import FORMATS
from tests.cli.conftest import NETWORKS, TINY, Cluster


def dcnr(*arguments: str) -> str:
    """Output of a command that needs nothing."""
    result = CliRunner(env={"NATS_URL": "nats://127.0.0.1:1"}).invoke(main, ["network", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("name", "vnodes", "millions"), [("topology_1", 143, 27), ("topology_2", 183, 45)])
def test_the_production_networks_validate(name: str, vnodes: int, millions: int) -> None:
    """With the promised numbers of VNodes and parameters."""
    found = json.loads(dcnr("validate", str(NETWORKS / f"{name}.yml"), "--json"))
    assert found["vnodes"] == vnodes
    assert round(found["parameters"] / 1e6) == millions


def test_every_problem_of_a_file_is_reported_with_its_place(tmp_path: Path) -> None:
    """Two mistakes, two lines, code 2, no traceback."""
    path = tmp_path / "bad.yml"
    path.write_text(
        "name: bad\nnodes:\n  - {id: a, type: lineer, config: {in_dim: 4, out_dim: 4}}\n  - {id: b, type: relu, config: {rat: 1}}\n"
    )
    result = CliRunner().invoke(main, ["network", "validate", str(path)])
    assert result.exit_code == 2
    assert f"{path}:3:" in result.output
    assert f"{path}:4:" in result.output
    assert "Traceback" not in result.output


def test_analysis_agrees_with_validation() -> None:
    """Same counts; what crosses two machines has bytes, and on one machine nothing crosses."""
    checked = json.loads(dcnr("validate", TINY, "--json"))
    two = json.loads(dcnr("analyze", TINY, "--pnodes", "2", "--batch", "4", "--explain", "--json"))
    one = json.loads(dcnr("analyze", TINY, "--pnodes", "1", "--json"))
    assert {key: two[key] for key in checked} == checked
    assert two["crossings"]
    assert all(crossing["forward_bytes"] > 0 for crossing in two["crossings"])
    assert two["explain"]
    assert one["crossings"] == []
    assert sum(node["parameters"] for node in two["nodes"]) == two["parameters"]


def test_analysis_is_readable() -> None:
    """A table of nodes, what crosses, the totals, and the reasons."""
    text = dcnr("analyze", TINY, "--explain")
    for word in ("embedder", "across machines", "parameters", "pnode-1 holds"):
        assert word in text


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_drawn(form: str, tmp_path: Path) -> None:
    """To stdout, and to a file."""
    out = tmp_path / "picture"
    picture = dcnr("draw", TINY, "--format", form)
    dcnr("draw", TINY, "--format", form, "--out", str(out))
    assert "embedder" in picture
    assert out.read_text().strip() == picture.strip()


@pytest.mark.nats
@pytest.mark.timeout(120)
def test_the_life_of_a_registered_network(cluster: Cluster, tmp_path: Path) -> None:
    """1. create; 2. create again is refused; 3. update; 4. show, list, validate by name; 5. a broken update changes nothing; 6. delete."""
    path = tmp_path / "mine.yml"
    text = Path(TINY).read_text().replace("name: tiny", "name: mine", 1)
    path.write_text(text)
    created = cluster.json("network", "create", str(path))
    assert created["name"] == "mine"
    assert "mine" in cluster.dcnr("network", "create", str(path), code=2).output
    path.write_text(text + "\n# changed\n")
    cluster.dcnr("network", "update", str(path))
    assert "# changed" in cluster.dcnr("network", "show", "mine").output
    assert "mine" in [row["name"] for row in cluster.json("network", "list")["networks"]]
    assert cluster.json("network", "validate", "mine")["parameters"] == created["parameters"]
    path.write_text("name: mine\nnodes: 3\n")
    cluster.dcnr("network", "update", str(path), code=2)
    assert "# changed" in cluster.json("network", "show", "mine")["file"]
    cluster.dcnr("network", "delete", "mine")
    assert "mine" in cluster.dcnr("network", "show", "mine", code=2).output


@pytest.mark.nats
@pytest.mark.timeout(120)
def test_a_clone_is_the_same_text_under_another_name(cluster: Cluster, tmp_path: Path) -> None:
    """1. of a file, and of a registered network; 2. a name that is taken, or is none, or a network that is unknown is refused."""
    text = Path(TINY).read_text()
    assert cluster.json("network", "clone", TINY, "first")["name"] == "first"
    assert cluster.json("network", "clone", "first", "second")["name"] == "second"
    shown = cluster.json("network", "show", "second")
    assert shown["file"] == text.replace("name: tiny", "name: second", 1)
    assert shown["file_name"] == "second.yml"
    assert "network 'second' exists" in cluster.dcnr("network", "clone", "first", "second", code=2).output
    assert "'a.b' is not a valid network name" in cluster.dcnr("network", "clone", "first", "a.b", code=2).output
    assert "no network 'nothing'" in cluster.dcnr("network", "clone", "nothing", "third", code=2).output
    for name in ("first", "second"):
        cluster.dcnr("network", "delete", name)

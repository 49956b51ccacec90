"""The files of `networks/` are what their generator writes, and their README tells the truth."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from dcnr.network.load import load_graph
from dcnr.nodes.spec import NodeConfig
from dcnr.placement.analyze import analyze
from tests.network.files import NETWORKS, SHIPPED, shipped

README = (NETWORKS / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """networks/generate.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("networks_generate", NETWORKS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date(generate: ModuleType) -> None:
    """`python networks/generate.py` would change nothing."""
    assert {name: (NETWORKS / name).read_text(encoding="utf-8") for name in generate.FILES} == {
        name: network.text() for name, network in generate.FILES.items()
    }


def test_the_table_of_node_types_is_up_to_date(generate: ModuleType) -> None:
    """It is written from NODE_TYPES."""
    assert generate.with_table(README) == README


def test_every_common_key_is_explained() -> None:
    """The hand-written table names all keys that every node has."""
    common = README[README.index("## Keys that every node has") : README.index("## Node types")]
    assert all(f"`{key}`" in common for key in NodeConfig.model_fields)


def test_the_example_of_the_readme_loads() -> None:
    """As it stands."""
    found = re.search(r"```yaml\n(.*?)```", README, re.S)
    assert found is not None
    assert len(load_graph(found[1], "README.md").nodes) == 3


def test_the_list_of_files_is_right() -> None:
    """VNodes exactly, parameters to the digits that are shown."""
    rows = re.findall(r"^\| `(\w+)\.yml` \|.*\| (\d+) \| ([\d.]+) M \|$", README, re.M)
    assert sorted(name for name, _, _ in rows) == sorted(SHIPPED) == sorted(path.stem for path in NETWORKS.glob("*.yml"))
    for name, vnodes, millions in rows:
        found = analyze(shipped(name), rows=1)
        digits = len(millions.partition(".")[2])
        assert (str(found.vnodes), f"{found.parameters / 1e6:.{digits}f}") == (vnodes, millions)


def test_what_recomputation_saves_is_right() -> None:
    """The numbers of the README, by the analysis."""
    rows = re.findall(r"^\| `(\w+)\.yml` \| ([\d,]+) \| ([\d,]+) \|$", README, re.M)
    assert [name for name, _, _ in rows] == ["shakespeare_char", "shakespeare_char_recompute"]
    for name, kept, again in rows:
        found = analyze(shipped(name), rows=64)
        assert (f"{found.activation_bytes:,}", f"{found.recompute_bytes:,}") == (kept, again)


def test_production_names() -> None:
    """By these the topologies are known."""
    assert shipped("topology_1").name == "distributed-multi-head-attention-6l-swiglu_ffn"
    assert shipped("topology_2").name == "distributed-multi-head-attention-8l-swiglu_ffn"

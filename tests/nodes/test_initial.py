"""First values of parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dcnr.nodes.attention import AttentionHeadConfig, FusedHeadsConfig
from dcnr.nodes.base import Parameter, ParameterPart
from dcnr.nodes.initial import initial_value
from dcnr.nodes.registry import NODE_TYPES
from dcnr.nodes.spec import BuildArgs

WEIGHT = Parameter("weight", (300, 400), (ParameterPart("up", "weight", 0, 300),), std=0.02)


def test_normal_values_have_their_spread() -> None:
    """Mean zero, the parameter's std, float32."""
    value = initial_value(1, WEIGHT)
    assert (value.shape, value.dtype.name) == ((300, 400), "float32")
    assert abs(value.mean()) < 4 * 0.02 / np.sqrt(value.size)
    assert abs(value.std() / 0.02 - 1) < 0.01


def test_values_depend_on_seed_and_canonical_name_alone() -> None:
    """Not on where the parameter is stored, nor on its std except as a factor."""
    value = initial_value(1, WEIGHT)
    np.testing.assert_array_equal(value, initial_value(1, replace(WEIGHT, name="something_else")))
    np.testing.assert_array_equal(value * 2, initial_value(1, replace(WEIGHT, std=0.04)))
    other = replace(WEIGHT, parts=(ParameterPart("down", "weight", 0, 300),))
    for changed in (initial_value(2, WEIGHT), initial_value(1, other)):
        assert abs(np.corrcoef(value.ravel(), changed.ravel())[0, 1]) < 0.02


def test_the_values_of_a_format_do_not_drift() -> None:
    """A session that is replayed on a later version starts from the same weights."""
    value = initial_value(7, Parameter("weight", (1, 3), (ParameterPart("n", "weight", 0, 1),), std=1.0))
    np.testing.assert_allclose(value, [[0.7590212, 0.4880864, -0.1666661]], rtol=1e-6)


def test_constants() -> None:
    """Gains are one, biases zero."""
    assert initial_value(1, Parameter("weight", (3,), (ParameterPart("ln", "weight", 0, 3),), None, 1.0)).tolist() == [1, 1, 1]
    assert initial_value(1, Parameter("bias", (2,), (ParameterPart("ln", "bias", 0, 2),), None)).tolist() == [0, 0]


def test_merged_heads_start_as_the_heads_they_are_made_of() -> None:
    """Each canonical part has the value it has alone."""
    config = AttentionHeadConfig(input_dim=7, head_dim=4)
    heads = ("head_0", "head_1", "head_2")

    def values(kind: str, node: str, members: tuple[str, ...]) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        resolved = FusedHeadsConfig.fuse([config] * 3) if kind == "fused_heads" else config
        built = NODE_TYPES[kind].build(BuildArgs(node, resolved, ((5, 7),), ((5, 4),), False, members))
        return {f"{part.node}.{part.name}": initial_value(3, p)[part.start : part.stop] for p in built.parameters for part in p.parts}

    merged = values("fused_heads", "stack", ("copy", *heads, "stack"))
    alone = {key: value for head in heads for key, value in values("attention_head", head, (head,)).items()}
    assert merged.keys() == alone.keys()
    for key, value in alone.items():
        np.testing.assert_array_equal(merged[key], value, err_msg=key)

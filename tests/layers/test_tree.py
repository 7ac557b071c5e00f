"""Paths, masks and rebuilding over trees of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.errors import CheckpointError
from retrax.layers import tree
from retrax.layers.base import Fn, Layer, PureLayer
from retrax.layers.combinators import Branch, Residual, Serial
from retrax.layers.control import Repeat, Scan
from retrax.shapes import ShapeDtype


class Pair(Layer):
    """Has weights in a dict and one state."""

    state_sync = "mean"

    def __init__(self, name=None):
        super().__init__(name=name)

    def init_weights_and_state(self, input_signature):
        self.weights = {"w": jnp.ones(input_signature.shape[-1]), "b": jnp.zeros(())}
        self.state = (jnp.zeros((), jnp.int32),)

    def forward(self, x):
        return x * self.weights["w"] + self.weights["b"]


def paths(layer, values):
    return [path for path, _ in tree.named_leaves(layer, values)]


def test_labels_do_not_depend_on_sizes():
    class Dense_(Layer):
        pass

    for layer, expected in (
        (Pair(), "Pair"),
        (Pair(name="Pair_512"), "Pair"),
        (Pair(name="ff"), "ff"),
        (Pair(name="a/b"), "a|b"),
        (Fn("Tanh", jnp.tanh), "Tanh"),
        (PureLayer(jnp.tanh), "PureLayer"),
        (Serial(name="Encoder"), "Encoder"),
    ):
        assert tree.label(layer) == expected


def test_paths_of_weights_and_state():
    shared = Pair(name="shared")
    model = Serial(shared, Residual(Pair(), shared), Branch(None, Pair(name="top")))
    weights, state = model.init(ShapeDtype((2, 3)))
    layers = (
        "0.shared",
        "1.Serial/0.Branch/1.Parallel/1.Serial/0.Pair",
        "2.Branch/1.Parallel/1.top",
    )
    expected = [f"{layer}/{key}" for layer in layers for key in ("b", "w")]
    assert paths(model, weights) == expected
    assert paths(model, state) == [f"{layer}/0" for layer in layers]
    assert tree.state_sync_list(model, state) == [
        (f"{layer}/0", "mean") for layer in layers
    ]
    assert paths(shared, shared.weights) == ["b", "w"]
    assert paths(Serial(), ()) == []


def test_own_state_of_a_combinator_has_a_path():
    scan = Scan(Fn("Step", lambda x, c: (x, c), n_out=2), mode="predict")
    _, state = scan.init((ShapeDtype((2, 3)), ShapeDtype((3,))))
    assert paths(scan, state) == ["own/0", "own/1/0"]
    assert tree.state_sync_list(scan, state) == [("own/0", None), ("own/1/0", None)]


def test_leaves_come_in_flattening_order():
    model = Serial(Pair(), Repeat(lambda: Residual(Pair(), Pair()), 2), Pair())
    weights, state = model.init(ShapeDtype((2, 3)))
    for values in (weights, state):
        named = tree.named_leaves(model, values)
        leaves = jax.tree.leaves(values)
        assert [id(x) for _, x in named] == [id(x) for x in leaves]
    assert "1.Repeat/block.Serial/0.Branch/1.Parallel/1.Serial/1.Pair/w" in paths(
        model, weights
    )
    inner = Repeat(lambda: Repeat(Pair, 2), 3)
    weights, _ = inner.init(ShapeDtype((2, 3)))
    assert [(p, x.shape) for p, x in tree.named_leaves(inner, weights)] == [
        ("block.Repeat/block.Pair/b", (3, 2)),
        ("block.Repeat/block.Pair/w", (3, 2, 3)),
    ]


def test_rebuild_takes_values_by_path():
    model = Serial(Pair(), Residual(Pair()))
    weights, _ = model.init(ShapeDtype((2, 3)))
    arrays = {
        path: np.full(x.shape, i)
        for i, (path, x) in enumerate(tree.named_leaves(model, weights))
    }
    shuffled = dict(reversed(list(arrays.items())))
    again = tree.rebuild(model, weights, shuffled)
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    for path, value in tree.named_leaves(model, again):
        np.testing.assert_array_equal(value, arrays[path])
    gone = list(arrays)[2]
    del shuffled[gone]
    with pytest.raises(CheckpointError, match=gone):
        tree.rebuild(model, weights, shuffled)


def test_trainable_is_inherited_downwards_and_through_repeat():
    first, inner = Pair(), Pair()
    repeat = Repeat(lambda: Serial(Pair(), inner), 2)
    model = Serial(first, repeat)
    weights, _ = model.init(ShapeDtype((2, 3)))
    assert tree.trainable_list(model, weights) == [True] * 6
    first.trainable = inner.trainable = False
    expected = [False, False, True, True, False, False]
    assert tree.trainable_list(model, weights) == expected
    repeat.trainable = False
    assert tree.trainable_list(model, weights) == [False] * 6

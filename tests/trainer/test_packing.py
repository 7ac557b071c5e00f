"""Packing: nothing is lost, and a packed step is the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import optimizers, shapes, trainer
from retrax.trainer.packing import Packing


def some_tree():
    rng = np.random.default_rng(0)
    return {
        "w": [jnp.asarray(rng.standard_normal((3, 4)), jnp.float32), jnp.float32(2.5)],
        "half": jnp.asarray(rng.standard_normal((2, 2)), jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "n": jnp.int32(7),
        "on": jnp.array([True, False]),
        "off": jnp.array(False),
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_unpacking_gives_back_every_leaf():
    tree = some_tree()
    packing = Packing(tree)
    packed = packing.pack(tree)
    assert sorted(x.size for x in packed) == [1, 3, 4, 13]
    assert_same(packing.unpack(packed), tree)


def test_packing_under_jit_is_the_same():
    tree = some_tree()
    packing = Packing(tree)
    traced = jax.jit(packing.pack)(tree)
    for a, b in zip(traced, packing.pack(tree), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert_same(jax.jit(packing.unpack)(traced), tree)


def test_unpacked_values_outlive_the_buffer():
    tree = {"a": jnp.arange(4.0), "b": jnp.ones(2)}
    packing = Packing(tree)
    buffers = jax.device_put(packing.pack(tree))
    out = packing.unpack(buffers)
    jax.tree.map(lambda x: x.delete(), buffers)
    assert out["a"].tolist() == [0, 1, 2, 3]


def test_kinds_do_not_share_a_buffer():
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    assert len(Packing(tree, kind=lambda path: path[0].key).pack(tree)) == 2
    assert Packing(tree) != Packing(tree, kind=lambda path: path[0].key)
    assert Packing(tree) == Packing({"a": jnp.zeros(2), "b": jnp.zeros(3)})


@pytest.mark.parametrize(
    "tree",
    [
        {"w": jnp.zeros(1 << 18), "b": jnp.zeros(1)},
        [jnp.zeros(())] * 41,
        {"w": jnp.zeros(2), "key": jax.random.key(0)},
    ],
    ids=["large", "many leaves", "random key"],
)
def test_what_does_not_suit_is_left_alone(tree):
    assert not Packing.suits(tree)
    assert Packing.suits({"w": jnp.zeros(2)})


def run(monkeypatch, max_leaves, batches, dropout=0.0, **options):
    monkeypatch.setattr(Packing, "MAX_LEAVES", max_leaves)
    model = tl.Serial(
        tl.BatchNorm(axis=0), tl.Dense(8), tl.Dropout(dropout), tl.Dense(1), tl.L2Loss()
    )
    model.init(shapes.signature(batches[0]), rng=jax.random.key(0))
    optimizer = optimizers.Adam(0.01, clip_grad_norm=0.5)
    stepper = trainer.StepTrainer(model, optimizer, n_devices=1, **options)
    losses = [float(stepper.one_step(b, jax.random.key(1))[0]) for b in batches]
    return losses, jax.tree.map(np.asarray, tuple(stepper.carry))


def some_batches(n):
    rng = np.random.default_rng(1)
    sizes = ((6, 3), (6, 1))
    draw = lambda s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    return [(*map(draw, sizes), np.ones((6, 1), np.float32)) for _ in range(n)]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"skip_nonfinite": False}])
def test_a_packed_step_equals_the_step_on_leaves(monkeypatch, options):
    batches = some_batches(5)
    losses, carry = run(monkeypatch, 40, batches, dropout=0.3, **options)
    losses0, carry0 = run(monkeypatch, 0, batches, dropout=0.3, **options)
    np.testing.assert_allclose(losses, losses0, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        carry,
        carry0,
    )


def test_a_packed_step_that_is_not_finite_changes_nothing(monkeypatch):
    good, bad = some_batches(2)
    bad = (bad[0] * np.inf, *bad[1:])
    _, before = run(monkeypatch, 40, [good])
    losses, after = run(monkeypatch, 40, [good, bad])
    assert not np.isfinite(losses[1])
    n_skipped = after[3]
    assert (int(before[3]), int(n_skipped)) == (0, 1)
    for a, b in zip(before[:3] + before[4:], after[:3] + after[4:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)

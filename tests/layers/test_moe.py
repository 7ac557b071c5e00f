"""MoE against a dense sum over all experts, and against counting by hand."""

import math

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers import tree
from retrax.layers.running import batch_context
from retrax.shapes import ShapeDtype, signature

D, N = 4, 3


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expert():
    return [tl.Dense(5), tl.Tanh(), tl.Dense(D)]


def prepared(x, *args, **kwargs):
    """A mixture with weights of size 1, and what it makes of x."""
    layer = tl.MoE(expert, N, *args, **kwargs)
    weights, state = layer.init(signature(x))
    leaves, structure = jax.tree.flatten(weights)
    leaves = [random(*w.shape, seed=i) for i, w in enumerate(leaves)]
    weights = jax.tree.unflatten(structure, leaves)
    return layer, weights, state


def router_probs(x, weights):
    logits = x.astype(np.float64) @ weights[0].astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def oracle(x, weights, k, capacity=None):
    """Token after token in float64; returns (y, choices that found no room)."""
    (w1, b1), _, (w2, b2) = weights[1]
    p = router_probs(x, weights)
    y, dropped = np.zeros(x.shape), 0
    for row in range(x.shape[0]):
        used = [0] * N
        for place in np.ndindex(x.shape[1:-1]):
            here = (row, *place)
            best = np.argsort(-p[here], kind="stable")[:k]
            total = p[here][best].sum() if k > 1 else 1.0
            for e in best:
                if capacity is not None and used[e] >= capacity:
                    dropped += 1
                    continue
                used[e] += 1
                hidden = np.tanh(x[here].astype(np.float64) @ w1[e] + b1[e])
                y[here] += p[here][e] / total * (hidden @ w2[e] + b2[e])
    return y, dropped


@pytest.mark.parametrize("shape", [(2, 6, D), (5, D), (2, 3, 2, D)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_with_room_for_all_it_is_the_dense_sum(shape, k):
    x = random(*shape, seed=9)
    wanted, _ = oracle(x, prepared(x, k)[1], k)
    for options in ({"capacity_factor": None}, {"mode": "eval"}):
        layer, weights, state = prepared(x, k, **options)
        y, _ = jax.jit(layer.pure_fn)(x, weights, state, None)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0])
def test_what_finds_no_room_adds_nothing(k, factor):
    x = random(3, 8, D, seed=9)
    layer, weights, state = prepared(x, k, factor)
    y, _, emitted = layer.apply(x, weights, state, None)
    wanted, dropped = oracle(x, weights, k, math.ceil(factor * k * 8 / N))
    assert dropped > 0
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dict(emitted)["moe_dropped"], dropped / (24 * k))


def test_later_tokens_and_other_rows_change_nothing():
    x = random(2, 8, D)
    layer, weights, state = prepared(x, 2, 0.5)
    y, _ = layer.pure_fn(x, weights, state, None)
    other = x.copy()
    other[0, 5:], other[1] = random(3, D, seed=4), 7.0
    z, _ = layer.pure_fn(other, weights, state, None)
    np.testing.assert_array_equal(y[0, :5], z[0, :5])
    assert (y[0, 5:] != z[0, 5:]).any()


def test_one_token_at_a_time_is_all_at_once_outside_of_training():
    x = random(2, 6, D)
    layer, weights, state = prepared(x, 2, mode="predict")
    whole, _ = layer.pure_fn(x, weights, state, None)
    for t in range(6):
        y, _ = layer.pure_fn(x[:, t : t + 1], weights, state, None)
        np.testing.assert_allclose(y[:, 0], whole[:, t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_balance_loss_is_its_formula(k):
    x = random(3, 7, D, seed=9)
    layer, weights, state = prepared(x, k, return_loss=True)
    (_, loss), _, emitted = layer.apply(x, weights, state, None)
    p = router_probs(x, weights).reshape(-1, N)
    chosen = np.argsort(-p, -1)[:, :k]
    f = np.bincount(chosen.ravel(), minlength=N) / chosen.size
    np.testing.assert_allclose(loss, N * (f * p.mean(0)).sum(), rtol=1e-5)
    assert dict(emitted)["moe_balance_loss"] == loss


def test_padded_rows_do_not_count():
    x = random(3, 7, D, seed=9)
    layer, weights, state = prepared(x, 2, 0.5)
    y, _, emitted = layer.apply(x, weights, state, None)
    padded = np.concatenate([x, np.full((2, 7, D), 50.0, np.float32)])
    with batch_context(None, jnp.array([1.0] * 3 + [0.0] * 2)):
        z, _, others = layer.apply(padded, weights, state, None)
    np.testing.assert_allclose(z[:3], y, rtol=1e-5, atol=1e-6)
    assert (z[3:] == 0).all()
    for (name, a), (same, b) in zip(emitted, others, strict=True):
        assert name == same
        np.testing.assert_allclose(a, b, rtol=1e-5)


def gradients(layer, weights, state, x, g, add=0.0):
    def loss(weights, x):
        out, _ = layer.pure_fn(x, weights, state, None)
        y, balance = out if layer.n_out == 2 else (out, 0.0)
        return (y * g).sum() + add * balance

    return jax.jit(jax.grad(loss, (0, 1)))(weights, x)


def assert_trees_close(got, wanted, rtol=1e-4, atol=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def test_the_added_gradient_is_that_of_the_weighted_loss():
    x, g = random(2, 6, D), random(2, 6, D, seed=1)
    by_hand, weights, state = prepared(x, return_loss=True)
    default, _, _ = prepared(x, balance_weight=0.7)
    without, _, _ = prepared(x, balance_weight=0.0)
    args = (weights, state, x, g)
    wanted = gradients(by_hand, *args, add=0.7)
    plain = gradients(by_hand, *args)
    assert_trees_close(gradients(default, *args), wanted)
    assert_trees_close(gradients(without, *args), plain)
    difference = np.abs(np.asarray(wanted[0][0]) - plain[0][0]).max()
    assert difference > 1e-3
    y, _ = default.pure_fn(x, weights, state, None)
    np.testing.assert_array_equal(y, by_hand.pure_fn(x, weights, state, None)[0][0])


def test_gradient_is_that_of_finite_differences():
    with jax.enable_x64(True):
        x, g = random(2, 4, D).astype(float), random(2, 4, D, seed=1)
        layer, weights, state = prepared(x, mode="eval")
        weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), weights)

        def loss(flat):
            y, _ = layer.pure_fn(x, jax.tree.unflatten(structure, flat), state, None)
            return (y * g).sum()

        flat, structure = jax.tree.flatten(weights)
        grads = jax.grad(loss)(flat)
        loss = jax.jit(loss)
        for i, w in enumerate(flat):
            place = tuple(0 for _ in w.shape)
            ends = [
                loss([*flat[:i], w.at[place].add(step), *flat[i + 1 :]])
                for step in (1e-6, -1e-6)
            ]
            wanted = (ends[0] - ends[1]) / 2e-6
            np.testing.assert_allclose(grads[i][place], wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("masked", [False, True])
def test_two_devices_are_one(masked):
    x, g = random(4, 6, D), random(4, 6, D, seed=1)
    layer, weights, state = prepared(x, 2, 0.5, balance_weight=0.7)
    mask = jnp.array([1.0, 1.0, 1.0, 0.0 if masked else 1.0])

    def loss(weights, x, g, mask, axis):
        with batch_context(axis, mask if masked else None):
            y, _, emitted = layer.apply(x, weights, state, None)
        return (y * g).sum(), dict(emitted)

    grad_fn = jax.grad(loss, has_aux=True)
    wanted, emitted = jax.jit(grad_fn, static_argnums=4)(weights, x, g, mask, None)

    def on_device(x, g, mask):
        grads, emitted = grad_fn(weights, x, g, mask, "batch")
        return jax.lax.psum(grads, "batch"), emitted

    halves = [a.reshape(2, 2, *a.shape[1:]) for a in (x, g, mask)]
    got, others = jax.jit(jax.vmap(on_device, axis_name="batch"))(*halves)
    assert_trees_close(jax.tree.map(lambda a: a[0], got), wanted, atol=1e-5)
    for name, value in emitted.items():
        np.testing.assert_allclose(others[name], [value, value], rtol=1e-5)


def test_repeat_is_a_chain_with_the_same_gradient():
    def block():
        return tl.Residual(tl.LayerNorm(), tl.MoE(expert, N, balance_weight=0.7))

    x, g = random(2, 6, D), random(2, 6, D, seed=1)
    deep, chain = tl.Repeat(block, 3), tl.Serial([block() for _ in range(3)])
    weights, state = deep.init(signature(x), rng=jax.random.key(0))
    chain.init(signature(x), rng=jax.random.key(1))
    parts = tuple(deep.block_weights(i) for i in range(3))
    y, _ = deep.pure_fn(x, weights, state, None)
    chain_state = jax.tree.map(lambda s: s, chain.state)
    z, _ = chain.pure_fn(x, parts, chain_state, None)
    np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)
    got = gradients(deep, weights, state, x, g)
    wanted, wanted_x = gradients(chain, parts, chain_state, x, g)
    stacked = jax.tree.map(lambda *ws: jnp.stack(ws), *wanted)
    assert_trees_close(got, (stacked, wanted_x), atol=1e-5)


def test_experts_start_apart_and_drop_apart():
    layer = tl.MoE(lambda: [tl.Dense(D), tl.Dropout(0.5)], 2, 2, None)
    x = jnp.ones((1, 5, D))
    weights, state = layer.init(signature(x), rng=jax.random.key(0))
    w = weights[1][0][0]
    assert w.shape == (2, D, D) and (w[0] != w[1]).all()
    same = jax.tree.map(lambda w: jnp.broadcast_to(w[:1], w.shape), weights[1])
    experts = layer.sublayers[1]
    y, _ = experts.pure_fn(jnp.ones((2, 5, D)), same, state[1], jax.random.key(1))
    assert ((y[0] == 0) != (y[1] == 0)).any()


def test_weights_have_names():
    layer = tl.MoE(tl.Dense(D), N)
    weights, _ = layer.init(ShapeDtype((2, 5, D)))
    names = [(n, w.shape) for n, w in tree.named_leaves(layer, weights)]
    assert names == [
        ("0.Router", (D, N)),
        ("1.Experts/block.Dense/0", (N, D, D)),
        ("1.Experts/block.Dense/1", (N, D)),
    ]


def test_balance_spreads_tokens_that_all_went_to_one_expert():
    x = random(8, 16, D) + 1
    layer = tl.MoE(tl.Dense(D), N, k=1, capacity_factor=None, return_loss=True)
    weights, state = layer.init(signature(x), rng=jax.random.key(0))
    weights = (weights[0].at[:, 0].add(0.7), weights[1])

    @jax.jit
    def step(weights):
        def loss(weights):
            return layer.pure_fn(x, weights, state, None)[0][1]

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.3 * g, weights, grads), value

    weights, first = step(weights)
    for _ in range(200):
        weights, last = step(weights)
    assert first > 1.7 and last < 1.2


def test_half_precision_routes_in_float32():
    x = jnp.asarray(random(2, 5, D), jnp.bfloat16)
    layer, weights, state = prepared(x, mode="eval")
    halves = (weights[0], jax.tree.map(jnp.bfloat16, weights[1]))
    y, _ = layer.pure_fn(x, halves, state, None)
    assert y.dtype == jnp.bfloat16
    wanted, _ = oracle(np.asarray(x, np.float32), weights, 2)
    np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: tl.MoE(expert, 2, k=3), "k=3, n_experts=2"),
        (lambda: tl.MoE(expert, 2, k=0), "k=0"),
        (lambda: tl.MoE(expert, 2, capacity_factor=0.0), "got 0.0; None leaves"),
        (lambda: tl.MoE(expert, 2, balance_weight=-1.0), "got -1.0"),
        (lambda: tl.MoE(lambda: tl.Add(), 2), "n_in=2"),
    ],
)
def test_it_refuses(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_it_refuses_inputs_that_do_not_fit():
    with pytest.raises(LayerError, match=r"\(batch, ..., d\), got \(4,\)"):
        tl.MoE(expert, 2).init(ShapeDtype((4,)))
    with pytest.raises(LayerError, match="keep shapes"):
        tl.MoE(lambda: tl.Dense(7), 2).init(ShapeDtype((2, 3, 4)))


def test_gin_sets_the_capacity_but_never_the_mode():
    gin.clear_config()
    try:
        gin.parse_config("retrax.layers.MoE.capacity_factor = 0.1")
        x = random(3, 8, D)
        layer, weights, state = prepared(x)
        _, _, emitted = layer.apply(x, weights, state, None)
        assert dict(emitted)["moe_dropped"] > 0.5
        with pytest.raises(ValueError, match="mode"):
            gin.parse_config("MoE.mode = 'eval'")
    finally:
        gin.clear_config()

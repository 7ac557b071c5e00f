"""The update step against hand-made gradients, NumPy in float64 and Optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import optimizers
from retrax.errors import ConfigError
from retrax.trainer.step import (
    Aux,
    Carry,
    Reduce,
    build_update,
    from_loss,
    from_reverse,
    from_vjp,
    step_rngs,
)

RNG = jax.random.key(5)
ONE = Reduce()


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def linear_loss(weights, state, rng, batch):
    """Weighted mean of squared errors of x w + b, by retrax's protocol of weights."""
    w, b = weights
    x, t, example_weights = batch
    error = x @ w + b - t
    total = jnp.sum(example_weights)
    safe = jnp.where(total == 0, 1, total)
    loss = jnp.sum(example_weights * error**2) / safe
    absolute = jnp.sum(example_weights * jnp.abs(error)) / safe
    metrics = {"absolute": (absolute, total), "rows": jnp.float32(len(t))}
    return loss, Aux(state=state, weight=total, metrics=metrics)


def numpy_linear(weights, batch):
    """(loss, mean absolute error, (dw, db)) of the same in float64."""
    w, b = (np.asarray(a, np.float64) for a in weights)
    x, t, q = (np.asarray(a, np.float64) for a in batch)
    error = x @ w + b - t
    total = q.sum()
    common = 2 * q * error / total
    loss, absolute = (q * error**2).sum() / total, (q * abs(error)).sum() / total
    return loss, absolute, (x.T @ common, common.sum())


def linear_batch(n=16, d=5):
    # Weights of examples from 0 to 30; the second quarter weighs nothing at all.
    q = np.abs(normal(2, n)) * np.linspace(0.1, 20, n, dtype=np.float32)
    q[n // 4 : n // 2] = 0
    return normal(0, n, d), normal(1, n), q


def linear_weights(d=5):
    return normal(3, d), np.float32(0.25)


def sgd_update(reduce=ONE, accumulate=1, grad_fn=None, **options):
    return build_update(
        grad_fn or from_loss(linear_loss, reduce),
        functools.partial(optimizers.SGD(1.0).tree_update, store_slots=False),
        reduce,
        trainable=[True, True],
        state_sync=[],
        accumulate=accumulate,
        **options,
    )


def carry_of(weights, state=(), slots=(None, None), trained=None):
    trained = weights if trained is None else trained
    norm = np.sqrt(sum(np.sum(np.square(w)) for w in jax.tree.leaves(trained)))
    return Carry(weights, state, slots, np.int32(0), np.float32(norm))


def opt_params(rate=1.0):
    return {"learning_rate": jnp.float32(rate)}


# --- Gradient sources ---------------------------------------------------------------


def block_1(x, w, state, rng):
    return jnp.tanh(x @ w), state + 1


def coupling(x, w, state, rng):
    a, b = x[:, :2], x[:, 2:]
    return jnp.concatenate([a + b @ w, b], axis=1), state + 1


def coupling_reverse_and_grad(y, cotangent, w, state, new_state, rng):
    b = y[:, 2:]
    x = jnp.concatenate([y[:, :2] - b @ w, b], axis=1)
    _, vjp = jax.vjp(lambda x, w: coupling(x, w, state, rng)[0], x, w)
    return x, vjp(cotangent)


def loss_block(inputs, w, state, rng):
    z, t = inputs
    return jnp.mean((z - t) ** 2), state


def numpy_chain(x, t, w1, w2):
    """Gradients of the chain block_1, coupling, loss, derived by hand."""
    x, t, w1, w2 = (np.asarray(a, np.float64) for a in (x, t, w1, w2))
    h = np.tanh(x @ w1)
    a, b = h[:, :2], h[:, 2:]
    z = np.concatenate([a + b @ w2, b], axis=1)
    dz = 2 * (z - t) / z.size
    dh = np.concatenate([dz[:, :2], dz[:, 2:] + dz[:, :2] @ w2.T], axis=1)
    return np.mean((z - t) ** 2), x.T @ (dh * (1 - h**2)), b.T @ dz[:, :2]


def test_three_gradient_sources_agree_with_the_gradient_by_hand():
    x, t, w1, w2 = normal(0, 6, 3), normal(1, 6, 5), normal(2, 3, 5), normal(3, 3, 2)
    expected_loss, expected_1, expected_2 = numpy_chain(x, t, w1, w2)

    def whole(weights, state, rng, batch):
        h, s1 = block_1(batch[0], weights[0], state[0], rng)
        z, s2 = coupling(h, weights[1], state[1], rng)
        loss, _ = loss_block((z, batch[1]), (), (), rng)
        return loss, Aux(state=(s1, s2))

    grads, aux = from_loss(whole, ONE)((w1, w2), (0, 10), RNG, (x, t))
    np.testing.assert_allclose(grads[0], expected_1, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(grads[1], expected_2, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(aux.loss, expected_loss, rtol=1e-6)
    assert aux.state == (1, 11)

    h, _ = block_1(x, w1, 0, RNG)
    z, s2 = coupling(h, w2, 10, RNG)
    no_grads, aux = from_vjp(loss_block)((), (), RNG, (z, t), jnp.float32(1))
    assert no_grads == ()
    np.testing.assert_allclose(aux.loss, expected_loss, rtol=1e-6)
    cotangent = aux.inputs[0]

    reverse = from_reverse(coupling_reverse_and_grad)
    grad_2, aux_2 = reverse(w2, 10, RNG, z, cotangent, s2)
    np.testing.assert_allclose(grad_2, expected_2, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(aux_2.inputs[0], h, atol=1e-6, rtol=1e-6)
    assert aux_2.state == 11 and aux_2.loss is None

    by_vjp, aux_vjp = from_vjp(coupling)(w2, 10, RNG, h, cotangent)
    np.testing.assert_allclose(by_vjp, grad_2, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(aux_vjp.inputs, aux_2.inputs[1], atol=1e-6, rtol=1e-6)

    grad_1, aux_1 = from_vjp(block_1)(w1, 0, RNG, x, aux_2.inputs[1])
    np.testing.assert_allclose(grad_1, expected_1, atol=1e-6, rtol=1e-6)
    assert aux_1.state == 1


def test_update_passes_on_what_a_block_gives_to_the_block_before():
    x, w2, cotangent = normal(0, 6, 5), normal(1, 3, 2), normal(2, 6, 5)
    update = build_update(
        from_vjp(coupling),
        functools.partial(optimizers.SGD(1.0).tree_update, store_slots=False),
        ONE,
        trainable=[True],
        state_sync=["same"],
    )
    carry = carry_of(w2, np.int32(3), (None,))
    carry, out = jax.jit(update)(carry, (opt_params(), RNG, 1), (x, cotangent))
    np.testing.assert_allclose(carry[0], w2 - x[:, 2:].T @ cotangent[:, :2], atol=1e-5)
    assert int(carry[1]) == 4 and "loss" not in out
    expected = np.concatenate(
        [cotangent[:, :2], cotangent[:, 2:] + cotangent[:, :2] @ w2.T], axis=1
    )
    np.testing.assert_allclose(out["inputs"], expected, atol=1e-5)


def test_a_loss_that_is_no_scalar_is_refused():
    grad_fn = from_loss(lambda w, s, r, x: (x * w, Aux()), ONE)
    with pytest.raises(ValueError, match=r"one number, got shape \(4,\).*Mean"):
        grad_fn(np.float32(1), (), RNG, np.ones(4, np.float32))


def test_gradients_of_another_structure_are_refused():
    update = sgd_update(grad_fn=lambda w, s, r, *xs: ((w[0], w[0]), Aux(loss=w[1])))
    carry = carry_of(linear_weights())
    with pytest.raises(ValueError, match="gradients do not match.*1: expected"):
        update(carry, (opt_params(), RNG, 1), (linear_batch(),))


# --- Keys ---------------------------------------------------------------------------


def test_step_keys_are_folded_and_split_and_nothing_else():
    forward, backward = step_rngs(RNG, 7)
    rest, expected_forward = jax.random.split(jax.random.fold_in(RNG, 7))
    _, expected_backward = jax.random.split(rest)
    for key, expected in ((forward, expected_forward), (backward, expected_backward)):
        assert (jax.random.key_data(key) == jax.random.key_data(expected)).all()
    other, _ = step_rngs(RNG, 8)
    assert (jax.random.key_data(other) != jax.random.key_data(forward)).any()


def test_the_gradient_gets_the_forward_key_of_its_step():
    seen = {}

    def grad_fn(weights, state, rng, batch):
        seen["rng"] = jax.random.key_data(rng)
        return weights, Aux(loss=jnp.float32(0), metrics={"key": seen["rng"][0]})

    carry = carry_of(linear_weights())
    sgd_update(grad_fn=grad_fn)(carry, (opt_params(), RNG, np.int32(9)), (None,))
    expected = jax.random.key_data(step_rngs(RNG, 9)[0])
    assert (seen["rng"] == expected).all()


# --- Accumulation -------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
def test_micro_batches_of_uneven_weight_equal_one_batch(k):
    weights, batch = linear_weights(), linear_batch()
    loss, absolute, (dw, db) = numpy_linear(weights, batch)
    carry = carry_of(weights)
    shared = (opt_params(), RNG, np.int32(1))
    carry, out = jax.jit(sgd_update(accumulate=k))(carry, shared, (batch,))
    np.testing.assert_allclose(carry[0][0], weights[0] - dw, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(carry[0][1], weights[1] - db, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(out["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(out["absolute"], absolute, rtol=1e-6)
    assert float(out["rows"]) == 16 / k  # Without a weight: the mean of the parts.
    norm = np.sqrt((dw**2).sum() + db**2)
    np.testing.assert_allclose(out["gradients_l2"], norm, rtol=1e-6)


def test_state_goes_from_micro_batch_to_micro_batch():
    def loss(weights, state, rng, batch):
        return linear_loss(weights, 2 * state + batch[1][0], rng, batch)

    update = build_update(
        from_loss(loss, ONE),
        functools.partial(optimizers.SGD(0.0).tree_update, store_slots=False),
        ONE,
        [True, True],
        ["same"],
        accumulate=4,
    )
    batch = linear_batch()
    carry = carry_of(linear_weights(), np.float32(1))
    carry, _ = jax.jit(update)(carry, (opt_params(0), RNG, 1), (batch,))
    expected = 1.0
    for i in range(4):
        expected = 2 * expected + float(batch[1][4 * i])
    np.testing.assert_allclose(carry[1], expected, rtol=1e-6)


def test_each_micro_batch_draws_its_own_random_numbers():
    def loss(weights, state, rng, batch):
        draw = jax.random.uniform(rng)
        return draw * jnp.sum(weights[0]), Aux(state=state, weight=jnp.float32(1))

    update = sgd_update(grad_fn=from_loss(loss, ONE), accumulate=2)
    carry = carry_of(linear_weights())
    carry, _ = update(carry, (opt_params(), RNG, np.int32(3)), (linear_batch(),))
    forward, _ = step_rngs(RNG, 3)
    draws = [float(jax.random.uniform(jax.random.fold_in(forward, i))) for i in (0, 1)]
    assert draws[0] != draws[1]
    expected = linear_weights()[0] - np.mean(draws)
    np.testing.assert_allclose(carry[0][0], expected, atol=1e-6, rtol=1e-6)


# --- Steps that are not finite ------------------------------------------------------


def adam_update(skip_nonfinite=True):
    opt = optimizers.Adam(0.01, weight_decay_rate=0)
    update = build_update(
        from_loss(
            lambda w, s, r, b: (
                linear_loss(w, s, r, b)[0],
                Aux(state=s + 1, weight=jnp.sum(b[2])),
            ),
            ONE,
        ),
        functools.partial(opt.tree_update, store_slots=False),
        ONE,
        [True, True],
        ["same"],
        skip_nonfinite=skip_nonfinite,
    )
    slots, params = opt.tree_init(linear_weights())
    return jax.jit(update), carry_of(linear_weights(), np.float32(0), slots), params


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_its_count(bad):
    update, carry, params = adam_update()
    good = linear_batch()
    broken = (good[0].copy(), *good[1:])
    broken[0][0, 0] = bad
    carry, out = update(carry, (params, RNG, np.int32(1)), (good,))
    assert bool(out["grads_finite"]) and int(out["skipped_steps"]) == 0
    after, out = update(carry, (params, RNG, np.int32(2)), (broken,))
    assert bits(after[:3]) == bits(carry[:3])
    assert int(after[3]) == int(out["skipped_steps"]) == 1
    assert not bool(out["grads_finite"])


def test_the_optimizers_step_number_stands_still_at_a_skipped_step():
    batches = [linear_batch(), (normal(7, 16, 5), normal(8, 16), np.ones(16, "f"))]
    broken = (batches[0][0] * np.nan, *batches[0][1:])

    # The oracle never sees the broken batches, the first step being one of them.
    opt = optax.adam(0.01, eps=1e-5)
    expected = jax.tree.map(jnp.asarray, linear_weights())
    opt_state = opt.init(expected)
    for batch in batches:
        grads = jax.grad(lambda w, b=batch: linear_loss(w, (), RNG, b)[0])(expected)
        updates, opt_state = opt.update(grads, opt_state)
        expected = optax.apply_updates(expected, updates)

    update, carry, params = adam_update()
    sequence = [broken, batches[0], broken, broken, batches[1]]
    for i, batch in enumerate(sequence, start=1):
        carry, _ = update(carry, (params, RNG, np.int32(i)), (batch,))
    assert int(carry[3]) == 3 and float(carry[1]) == 2
    for got, want in zip(carry[0], expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)


def test_skip_nonfinite_false_lets_the_step_through():
    update, carry, params = adam_update(skip_nonfinite=False)
    batch = linear_batch()
    batch[0][0, 0] = np.nan
    carry, out = update(carry, (params, RNG, np.int32(1)), (batch,))
    assert np.isnan(carry[0][0]).all() and float(carry[1]) == 1
    assert not bool(out["grads_finite"]) and int(carry[3]) == 0


# --- What is not trained ------------------------------------------------------------


def test_fixed_leaves_keep_their_bits_and_have_no_slot():
    opt = optimizers.Adam(0.1, weight_decay_rate=0.5)
    update = build_update(
        from_loss(linear_loss, ONE),
        functools.partial(opt.tree_update, store_slots=False),
        ONE,
        trainable=[False, True],
        state_sync=[],
    )
    w, b = linear_weights()
    slots, params = opt.tree_init((None, b))
    assert len(slots) == 1
    carry = carry_of((w, b), (), slots, trained=b)
    for step in (1, 2, 3):
        carry, _ = update(carry, (params, RNG, np.int32(step)), (linear_batch(),))
    assert bits(carry[0][0]) == bits(w)
    assert float(carry[0][1]) != float(b)
    assert len(carry[2]) == 1


# --- Replicas, each a row of a vmap with a named axis -------------------------------


def on_replicas(kind, batches, accumulate=1, weights=None, **options):
    """One SGD step of rate 1 on replicas: (gradients, out) of the first."""
    n = len(batches)
    reduce = Reduce("batch", n, kind)
    update = sgd_update(reduce, accumulate, **options)
    weights = linear_weights() if weights is None else weights
    carry = carry_of(weights)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    carry, out = jax.vmap(
        lambda xs: update(carry, (opt_params(), RNG, np.int32(1)), (xs,)),
        axis_name="batch",
    )(stacked)
    for x in jax.tree.leaves((carry, out)):
        assert len(set(bits(list(x)))) == 1  # Replicas agree.
    grads = jax.tree.map(lambda a, b: a - b[0], weights, carry[0])
    return grads, jax.tree.map(lambda x: x[0], out)


def pieces(batch, n):
    return [tuple(np.split(x, n)[i] for x in batch) for i in range(n)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
def test_replicas_of_uneven_weight_equal_the_whole_batch(n, accumulate):
    batch = linear_batch()  # With four replicas the second one weighs nothing.
    loss, absolute, (dw, db) = numpy_linear(linear_weights(), batch)
    (got_w, got_b), out = on_replicas("weight", pieces(batch, n), accumulate)
    np.testing.assert_allclose(got_w, dw, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(got_b, db, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(out["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(out["absolute"], absolute, rtol=1e-6)


def test_reduce_mean_is_the_plain_mean_over_replicas():
    parts = pieces(linear_batch(), 2)
    each = [numpy_linear(linear_weights(), part) for part in parts]
    (got_w, got_b), out = on_replicas("mean", parts)
    np.testing.assert_allclose(
        got_w, np.mean([e[2][0] for e in each], 0), atol=1e-6, rtol=1e-6
    )
    np.testing.assert_allclose(
        got_b, np.mean([e[2][1] for e in each]), atol=1e-6, rtol=1e-6
    )
    np.testing.assert_allclose(out["loss"], np.mean([e[0] for e in each]), rtol=1e-6)


def adasum_of(gradients):
    """What Adasum makes of given gradients of one weight vector, one per replica."""

    def grad_fn(weights, state, rng, batch):
        grads = (batch[0], jnp.zeros_like(weights[1]))
        return grads, Aux(loss=jnp.float32(2))

    batches = [(np.float32(g), np.zeros(1, "f"), np.ones(1, "f")) for g in gradients]
    weights = (np.zeros(len(gradients[0]), np.float32), np.float32(0))
    (got, _), out = on_replicas("adasum", batches, grad_fn=grad_fn, weights=weights)
    assert float(out["loss"]) == 2
    return np.asarray(got)


def test_adasum_counts_common_directions_once_and_adds_others():
    parallel = adasum_of([[3, 4], [3, 4]])
    np.testing.assert_allclose(parallel, [3, 4], atol=1e-6, rtol=1e-6)
    orthogonal = adasum_of([[3, 0], [0, 4]])
    np.testing.assert_allclose(orthogonal, [3, 4], atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(
        adasum_of([[1, 2], [0, 0]]), [1, 2], atol=1e-6, rtol=1e-6
    )
    four = adasum_of([[1, 0, 0], [0, 2, 0], [1, 0, 0], [0, 2, 0]])
    np.testing.assert_allclose(four, [1, 2, 0], atol=1e-6, rtol=1e-6)


def test_adasum_follows_the_papers_equation():
    a, b = np.float64(normal(0, 5)), np.float64(normal(1, 5))
    dot = a @ b
    expected = (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b
    np.testing.assert_allclose(adasum_of([a, b]), expected, atol=1e-6, rtol=1e-6)


def test_a_gradient_that_is_not_finite_on_one_replica_skips_the_step_on_all():
    parts = pieces(linear_batch(), 2)
    parts[1][0][0, 0] = np.nan
    parts[1][2][:] = 1
    (got_w, got_b), out = on_replicas("weight", parts)
    assert not np.asarray(got_w).any() and not float(got_b)
    assert int(out["skipped_steps"]) == 1


def test_each_replica_has_its_own_key():
    keys = jax.vmap(
        lambda i: jax.random.key_data(Reduce("batch", 3).key(RNG)), axis_name="batch"
    )(np.arange(3))
    expected = [jax.random.key_data(jax.random.fold_in(RNG, i)) for i in range(3)]
    assert (keys == jnp.stack(expected)).all()
    assert ONE.key(RNG) is RNG


def test_state_is_joined_as_its_layer_declares():
    old = (np.float32(10), np.float32(1), np.int32(4), np.float32(5))
    new = (
        np.float32([12, 15]),
        np.float32([2, 6]),
        np.int32([5, 5]),
        np.float32([7, 7]),
    )
    joined = jax.vmap(
        lambda s: Reduce("batch", 2).state(s, old, ["sum", "mean", "mean", "same"]),
        axis_name="batch",
    )(new)
    expected = [[17, 17], [4, 4], [5, 5], [7, 7]]  # 10 + (12 - 10) + (15 - 10).
    np.testing.assert_array_equal([np.asarray(x) for x in joined], expected)


def test_impossible_reductions_are_refused():
    with pytest.raises(ConfigError, match="'weight', 'mean', 'adasum'.*'sum'"):
        Reduce(kind="sum")
    with pytest.raises(ConfigError, match="power of two of devices, got 3"):
        Reduce("batch", 3, "adasum")

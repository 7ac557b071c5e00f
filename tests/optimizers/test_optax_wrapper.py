"""FromOptax against the same transformation run by Optax alone."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax.optimizers import SGD, FromOptax

WEIGHTS = {
    "a": jnp.arange(6.0).reshape(2, 3) / 7 + 0.3,
    "b": (jnp.array([0.5, -0.25]), ()),
}


def grads_at(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype), WEIGHTS
    )


def run_optax(tx, n_steps=4, change=lambda g: g, set_rate=None):
    weights, state = WEIGHTS, tx.init(WEIGHTS)
    update = jax.jit(tx.update)
    for step in range(1, n_steps + 1):
        if set_rate is not None:
            state.hyperparams["learning_rate"] = jnp.float32(set_rate(step))
        updates, state = update(change(grads_at(step)), state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def run_ours(opt, n_steps=4, set_rate=None, wrap=jax.jit):
    weights = WEIGHTS
    slots, opt_params = opt.tree_init(weights)
    update = wrap(lambda *args: opt.tree_update(*args, store_slots=False))
    for step in range(1, n_steps + 1):
        if set_rate is not None:
            opt_params = {**opt_params, "learning_rate": jnp.float32(set_rate(step))}
        weights, slots, _ = update(step, grads_at(step), weights, slots, opt_params)
    return weights


def assert_close(got, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=5e-6),
        got,
        expected,
    )


def matrices_only(weights):
    return jax.tree.map(lambda w: w.ndim > 1, weights)


def by_rank(weights):
    return jax.tree.map(lambda w: "matrix" if w.ndim > 1 else "vector", weights)


TRANSFORMATIONS = {
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "chain": optax.chain(optax.clip_by_global_norm(0.3), optax.adam(0.1)),
    "masked": optax.adamw(0.1, weight_decay=0.3, mask=matrices_only),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.sgd(0.2, momentum=0.5)}, by_rank
    ),
    "schedule": optax.sgd(optax.exponential_decay(0.1, 1, 0.5)),
    "noise": optax.chain(optax.add_noise(0.5, 0.55, 0), optax.sgd(0.1)),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_same_weights_as_optax_alone_also_after_a_resume(name):
    tx = TRANSFORMATIONS[name]
    first = FromOptax(tx)
    slots, opt_params = first.tree_init(WEIGHTS)
    assert first.slots is slots
    weights, update = WEIGHTS, jax.jit(first.tree_update)
    for step in (1, 2):
        weights, slots, _ = update(step, grads_at(step), weights, slots, opt_params)

    host = jax.device_get(slots)
    assert type(host) is tuple
    assert all(isinstance(x, (np.ndarray, np.generic)) for x in host)
    slots = pickle.loads(pickle.dumps(host))
    second = FromOptax(tx)  # never saw tree_init; runs eagerly
    for step in (3, 4):
        weights, slots, _ = second.tree_update(
            step, grads_at(step), weights, slots, second.opt_params
        )
    assert second.slots is slots
    assert_close(weights, run_optax(tx))
    for x, y in zip(jax.tree.leaves(weights), jax.tree.leaves(WEIGHTS), strict=True):
        assert np.abs(x - y).max() > 1e-3


def rate(step):
    return 0.3 / step


def test_injected_rate_follows_opt_params():
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
    opt = FromOptax(tx)
    assert_close(run_ours(opt), run_optax(tx))
    assert opt.uses_learning_rate is True
    assert opt.opt_params["learning_rate"] == np.float32(0.05)
    assert_close(run_ours(opt, set_rate=rate), run_optax(tx, set_rate=rate))


def test_injected_rate_is_found_inside_other_transformations():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05)
    opt = FromOptax(optax.chain(optax.masked(optax.scale(1.0), matrices_only), inner))
    assert_close(run_ours(opt, set_rate=rate), run_optax(inner, set_rate=rate))


def test_injected_rate_starts_at_the_argument():
    opt = FromOptax(optax.inject_hyperparams(optax.sgd)(learning_rate=0.05), 0.2)
    _, opt_params = opt.tree_init(WEIGHTS)
    assert opt_params["learning_rate"] == np.float32(0.2)
    assert_close(run_ours(opt), run_optax(optax.sgd(0.2)))


def test_given_rate_multiplies_updates():
    opt = FromOptax(optax.adamw(1.0, weight_decay=0.1), learning_rate=0.02)
    assert opt.uses_learning_rate is True
    assert_close(run_ours(opt), run_optax(optax.adamw(0.02, weight_decay=0.1)))
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1.0, weight_decay=0.1)
    assert_close(run_ours(opt, set_rate=rate), run_optax(tx, set_rate=rate))


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 0.1),
    ],
    ids=["plain", "injected schedule"],
)
def test_own_rate_stays_in_charge(tx):
    opt = FromOptax(tx)
    assert opt.uses_learning_rate is None
    assert_close(run_ours(opt, set_rate=rate), run_optax(optax.sgd(0.1)))
    assert opt.uses_learning_rate is False


def test_several_injected_rates_are_refused():
    one = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05)
    with pytest.raises(ValueError, match="2 injected learning rates"):
        FromOptax(optax.chain(one, one)).tree_init(WEIGHTS)


def test_clipping_and_stats():
    opt = FromOptax(optax.sgd(1.0, momentum=0.5), clip_grad_norm=0.1)

    def clip(grads):
        leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
        norm = np.sqrt(sum((g**2).sum() for g in leaves))
        return jax.tree.map(lambda g: g * min(1.0, 0.1 / norm), grads)

    assert_close(run_ours(opt), run_optax(optax.sgd(1.0, momentum=0.5), change=clip))
    slots, opt_params = opt.tree_init(WEIGHTS)
    _, _, stats = opt.tree_update(1, WEIGHTS, WEIGHTS, slots, opt_params)
    norm = np.sqrt(sum((np.asarray(w) ** 2).sum() for w in jax.tree.leaves(WEIGHTS)))
    np.testing.assert_allclose(stats["gradients_l2"], norm, rtol=1e-6)
    np.testing.assert_allclose(stats["weights_l2"], norm, rtol=1e-6)


def test_optax_state_gives_the_state_back():
    tx = optax.adam(0.1)
    opt = FromOptax(tx)
    with pytest.raises(ValueError, match="call tree_init first"):
        opt.optax_state(WEIGHTS)
    opt.tree_init(WEIGHTS)
    state, expected = opt.optax_state(WEIGHTS), tx.init(WEIGHTS)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert isinstance(state[0], optax.ScaleByAdamState)


def test_one_wrapper_serves_several_trees():
    opt = FromOptax(optax.adam(0.1))
    small, large = {"w": jnp.ones(2)}, (jnp.ones(3), jnp.ones(1))
    small_slots, opt_params = opt.tree_init(small)
    large_slots, _ = opt.tree_init(large)
    for weights, slots in ((small, small_slots), (large, large_slots)):
        new, _, _ = opt.tree_update(1, weights, weights, slots, opt_params)
        for w in jax.tree.leaves(new):
            np.testing.assert_allclose(w, 0.9, rtol=1e-5)


def test_per_leaf_interface():
    opt = FromOptax(optax.sgd(0.5, momentum=0.5))
    w = jnp.array([1.0])
    slots = opt.init(w)
    for step in (1, 2):
        w, slots = opt.update(step, jnp.array([1.0]), w, slots, opt.opt_params)
    np.testing.assert_allclose(w, [1.0 - 0.5 - 0.75])


def test_nothing_traced_is_kept():
    opt = FromOptax(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    jax.jit(lambda w: opt.tree_init(w)[0])(WEIGHTS)
    assert opt.slots is None
    assert isinstance(float(opt.opt_params["learning_rate"]), float)


def test_slots_of_another_transformation_are_refused():
    opt = FromOptax(optax.adam(0.1))
    with pytest.raises(ValueError, match="2 slots were given, but .* has 5 arrays"):
        opt.tree_update(1, WEIGHTS, WEIGHTS, (jnp.ones(1), jnp.ones(1)), opt.opt_params)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (optax.adam, "Call the function first"),
        (SGD(), "already: use it as it is"),
        (optax.MultiSteps(optax.sgd(0.1), 2), "gradient_transformation"),
        (0.1, "got 0.1 of type float"),
    ],
)
def test_what_is_no_transformation(bad, words):
    with pytest.raises(TypeError, match=f"takes an optax.Grad(.|\n)*{words}"):
        FromOptax(bad)

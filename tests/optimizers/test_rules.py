"""Every rule: against Optax, and the properties that all of them share.

The oracle is Optax, run on the whole tree, with the arguments under which the
formulas agree. Where a rule differs from Optax, its own test file has a NumPy oracle.
"""

import pickle

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import optimizers
from retrax.optimizers.norms import at_least_float32

SHAPES = [(), (1,), (3, 4), (4, 3), (2, 3, 4)]
ALL = (0, 1, 2, 3)

# name: (rule, the same in Optax, ranks on which they agree)
SAME_AS_OPTAX = {
    "sgd": (optimizers.SGD(0.1), optax.sgd(0.1), ALL),
    "momentum": (
        optimizers.Momentum(0.1, mass=0.8, weight_decay_rate=0.0, nesterov=False),
        optax.sgd(0.1, momentum=0.8),
        ALL,
    ),
    "nesterov": (
        optimizers.Momentum(0.1, mass=0.8, weight_decay_rate=0.0),
        optax.sgd(0.1, momentum=0.8, nesterov=True),
        ALL,
    ),
    "rms_prop": (
        optimizers.RMSProp(0.1, gamma=0.7, eps=1e-3),
        optax.rmsprop(0.1, decay=0.7, eps=1e-3, initial_scale=1.0, eps_in_sqrt=False),
        ALL,
    ),
    "adam": (
        optimizers.Adam(0.1, weight_decay_rate=0.0, b1=0.8, b2=0.95, eps=1e-6),
        optax.adam(0.1, b1=0.8, b2=0.95, eps=1e-6),
        ALL,
    ),
    "adamw": (
        optimizers.AdamW(0.1, weight_decay_rate=0.03),
        optax.adamw(0.1, weight_decay=0.03),
        ALL,
    ),
    "lion": (
        optimizers.Lion(0.1, weight_decay_rate=0.03, b1=0.8, b2=0.95),
        optax.lion(0.1, b1=0.8, b2=0.95, weight_decay=0.03),
        ALL,
    ),
    "adafactor": (
        optimizers.Adafactor(0.1, weight_decay_rate=0.01, epsilon1=1e-12),
        optax.adafactor(
            0.1, min_dim_size_to_factor=1, weight_decay_rate=0.01, eps=1e-12
        ),
        (0, 1, 2),
    ),
    "adafactor_momentum": (
        optimizers.Adafactor(
            0.1,
            factored=False,
            multiply_by_parameter_scale=False,
            do_clipping=False,
            do_momentum=True,
            beta1=0.6,
            decay_rate=0.5,
            weight_decay_rate=0.0,
        ),
        optax.adafactor(
            0.1,
            factored=False,
            multiply_by_parameter_scale=False,
            clipping_threshold=None,
            momentum=0.6,
            decay_rate=0.5,
            eps=1e-16,
        ),
        ALL,
    ),
    "sm3": (
        optimizers.SM3(0.1, momentum=0.7),
        optax.chain(optax.scale_by_sm3(0.7, 1.0, 0.0), optax.scale(-0.1)),
        (1, 2, 3),
    ),
    "sm3_averaged": (
        optimizers.SM3(0.1, momentum=0.7, second_moment_averaging=0.9),
        optax.chain(optax.scale_by_sm3(0.7, 0.9, 0.0), optax.scale(-0.1)),
        (1, 2, 3),
    ),
    "from_optax": (optimizers.FromOptax(optax.adam(0.1)), optax.adam(0.1), ALL),
}
RULES = {name: rule for name, (rule, _, _) in SAME_AS_OPTAX.items()}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def eagerly(f):
    return f


def random_tree(seed, ranks=ALL, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    leaves = [jnp.asarray(rng.normal(size=s), dtype) for s in SHAPES if len(s) in ranks]
    return {"first": (leaves[0], []), "rest": [(), *leaves[1:]]}


def run(rule, weights, n_steps=5, wrap=jax.jit):
    slots, opt_params = rule.tree_init(weights)
    update = wrap(lambda *args: rule.tree_update(*args, store_slots=False))
    for step in range(1, n_steps + 1):
        grads = random_tree(step, ranks={w.ndim for w in jax.tree.leaves(weights)})
        weights, slots, _ = update(step, grads, weights, slots, opt_params)
    return weights, slots


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", SAME_AS_OPTAX)
def test_five_steps_jitted_and_eager_equal_optax(name):
    rule, tx, ranks = SAME_AS_OPTAX[name]
    start = random_tree(0, ranks)
    got, slots = run(rule, start)
    eager, eager_slots = run(rule, start, wrap=eagerly)
    assert_close((eager, eager_slots), (got, slots))

    weights, state = start, tx.init(start)
    update = jax.jit(tx.update)
    for step in range(1, 6):
        updates, state = update(random_tree(step, ranks), state, weights)
        weights = optax.apply_updates(weights, updates)
    # 1 - 0.999 is formed in float64 by Optax, which was given a constant, in float32
    # by us: a relative difference of 3e-5 in a step of 0.1.
    assert_close(got, weights, rtol=2e-5, atol=5e-6)
    # and they did move
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(start), strict=True):
        assert np.abs(np.asarray(x - y)).min() > 1e-4


@every_rule
def test_hyperparameters_change_without_compiling_again(rule):
    n_traces = 0

    @jax.jit
    def update(step, weights, slots, opt_params):
        nonlocal n_traces
        n_traces += 1
        return rule.tree_update(step, weights, weights, slots, opt_params)[0]

    weights = random_tree(0)
    slots, opt_params = rule.tree_init(weights)
    for name, value in opt_params.items():
        update(1, weights, slots, {**opt_params, name: value * 0.5})
    assert n_traces == 1


@every_rule
def test_learning_rate_zero_moves_nothing_but_decay(rule):
    if isinstance(rule, optimizers.FromOptax):
        pytest.skip("this one keeps the rate it was made with")
    weights = random_tree(0)
    slots, opt_params = rule.tree_init(weights)
    opt_params["learning_rate"] = jnp.float32(0)
    new, _, _ = rule.tree_update(1, random_tree(1), weights, slots, opt_params)
    multiplied = isinstance(rule, (optimizers.AdamW, optimizers.Lion))
    decay = 0 if multiplied else float(opt_params.get("weight_decay_rate", 0))
    assert_close(new, jax.tree.map(lambda w: np.asarray(w) * (1 - decay), weights))


@every_rule
def test_half_precision_weights_keep_their_dtype(rule):
    dtype = jnp.bfloat16
    weights = random_tree(0, dtype=dtype)
    slots, opt_params = rule.tree_init(weights)
    before = [(x.shape, x.dtype) for x in jax.tree.leaves(slots)]
    new, slots, _ = rule.tree_update(1, random_tree(1), weights, slots, opt_params)
    assert {w.dtype for w in jax.tree.leaves(new)} == {jnp.dtype(dtype)}
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(slots)] == before
    if not isinstance(rule, optimizers.FromOptax):  # there Optax chooses
        assert {dtype for _, dtype in before} <= {jnp.dtype(jnp.float32)}
    # Half-precision weights move as float32 ones do, to half precision.
    wide, _ = run(rule, jax.tree.map(at_least_float32, weights), 1, eagerly)
    if not isinstance(rule, optimizers.FromOptax):
        assert_close(jax.tree.map(at_least_float32, new), wide, 1e-2, 1e-2)


@every_rule
def test_slots_are_plain_and_survive_pickling(rule):
    weights = random_tree(0)
    _, slots = run(rule, weights, 1, eagerly)
    host = jax.device_get(slots)
    assert isinstance(host, tuple)
    if not isinstance(rule, optimizers.FromOptax):
        assert len(host) == len(SHAPES)
    assert_plain(host)
    back = pickle.loads(pickle.dumps(host))
    _, opt_params = rule.tree_init(weights)
    grads = random_tree(1)
    one, _, _ = rule.tree_update(2, grads, weights, slots, opt_params)
    two, _, _ = rule.tree_update(2, grads, weights, back, opt_params)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def assert_plain(x):
    if type(x) in (tuple, list):
        for part in x:
            assert_plain(part)
    else:
        assert x is None or isinstance(x, (np.ndarray, np.generic)), type(x)


@every_rule
def test_first_slots_share_no_buffer(rule):
    # A buffer that is donated twice is an error.
    weights = random_tree(0)
    leaves = jax.tree.leaves((weights, rule.tree_init(weights)[0]))
    filled = [x for x in leaves if x.size]
    assert len({x.unsafe_buffer_pointer() for x in filled}) == len(filled)


@every_rule
def test_zero_gradients_give_no_nan(rule):
    weights = random_tree(0)
    slots, opt_params = rule.tree_init(weights)
    for step in (1, 2):
        zeros = jax.tree.map(jnp.zeros_like, weights)
        new, slots, _ = rule.tree_update(step, zeros, weights, slots, opt_params)
        assert all(np.isfinite(w).all() for w in jax.tree.leaves((new, slots)))


@pytest.mark.parametrize(
    ("make", "defaults"),
    [
        (optimizers.SGD, {"learning_rate": 0.01}),
        (
            optimizers.Momentum,
            {"learning_rate": 0.01, "mass": 0.9, "weight_decay_rate": 1e-5},
        ),
        (optimizers.RMSProp, {"learning_rate": 1e-3, "gamma": 0.9, "eps": 1e-8}),
        (
            optimizers.Adam,
            {
                "learning_rate": 1e-4,
                "weight_decay_rate": 1e-5,
                "b1": 0.9,
                "b2": 0.999,
                "eps": 1e-5,
            },
        ),
        (
            optimizers.Adafactor,
            {
                "learning_rate": 0.05,
                "beta1": 0.0,
                "decay_rate": 0.8,
                "clipping_threshold": 1.0,
                "weight_decay_rate": 1e-5,
                "weight_decay_n_steps": 0,
                "epsilon1": 1e-16,
                "epsilon2": 1e-3,
            },
        ),
        (
            optimizers.SM3,
            {
                "learning_rate": 0.01,
                "momentum": 0.9,
                "second_moment_averaging": 1.0,
                "weight_decay": 0.0,
            },
        ),
    ],
)
def test_defaults_are_those_of_trax(make, defaults):
    got = make().opt_params
    assert {k: np.float32(v) for k, v in got.items()} == {
        k: np.float32(v) for k, v in defaults.items()
    }


@pytest.mark.parametrize(
    "make",
    [getattr(optimizers, name) for name in optimizers.__all__ if name[0].isupper()],
    ids=lambda make: make.__name__,
)
def test_every_rule_can_clip(make):
    if make in (optimizers.Optimizer, optimizers.MomentumType):
        pytest.skip("not a rule")
    first = (optax.sgd(0.1),) if make is optimizers.FromOptax else ()
    assert make(*first, clip_grad_norm=2.0).clip_grad_norm == 2.0


def test_gin_names():
    gin.clear_config()
    try:
        gin.parse_config("Adam.b1 = 0.5\nretrax.optimizers.SGD.learning_rate = 3.0")
        assert optimizers.Adam().opt_params["b1"] == 0.5
        assert optimizers.SGD().opt_params["learning_rate"] == 3.0
        assert optimizers.AdamW().opt_params["b1"] == np.float32(0.9)
    finally:
        gin.clear_config()


def test_opt_configure_registers_a_rule_of_your_own():
    @optimizers.opt_configure()
    class RuleForTestsOnly(optimizers.SGD):
        def __init__(self, learning_rate=0.25):
            super().__init__(learning_rate=learning_rate)

    gin.clear_config()
    try:
        gin.parse_config("retrax.optimizers.RuleForTestsOnly.learning_rate = 0.75")
        assert RuleForTestsOnly().opt_params["learning_rate"] == 0.75
    finally:
        gin.clear_config()

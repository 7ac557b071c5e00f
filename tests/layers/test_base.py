"""What every layer promises: errors, sharing, keys, copies, setters, threads."""

import copy
import pickle
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.errors import LayerError
from retrax.layers import tree
from retrax.layers.base import (
    GET_STATE_FROM_CACHE,
    GET_WEIGHTS_FROM_CACHE,
    Fn,
    Layer,
    PureLayer,
)
from retrax.layers.combinators import Branch, Freeze, Residual, Serial
from retrax.layers.running import batch_context, data_axis, emit, row_mask
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(7)


class Affine(Layer):
    """x @ w + b, plain enough to be checked by hand."""

    def __init__(self, n, name=None):
        super().__init__(name=name or f"Affine_{n}")
        self._n = n

    def init_weights_and_state(self, input_signature):
        k_w, k_b = jax.random.split(self.rng)
        w = jax.random.normal(k_w, (input_signature.shape[-1], self._n))
        self.weights = (w, jax.random.normal(k_b, (self._n,)))

    def forward(self, x):
        w, b = self.weights
        return x @ w + b


class Counter(Layer):
    """Counts its calls and adds the count to its input."""

    def init_weights_and_state(self, input_signature):
        self.state = jnp.zeros((), jnp.int32)

    def forward(self, x):
        self.state = self.state + 1
        return x + self.state


class Noise(Layer):
    def forward(self, x):
        return x + jax.random.normal(self.rng, x.shape)


class Direct(Layer):
    """Calls its sublayers as plain functions."""

    def __init__(self, *layers):
        super().__init__()
        self._sublayers = list(layers)

    def init_weights_and_state(self, input_signature):
        parts = [s.init(input_signature, use_cache=True) for s in self.sublayers]
        self.weights = tuple(w for w, _ in parts)
        self.state = tuple(s for _, s in parts)

    def forward(self, x):
        for layer in self.sublayers:
            x = layer(x)
        return x


class FailsToInit(Layer):
    def init_weights_and_state(self, input_signature):
        raise RuntimeError("no weights today\nsecond line")

    def forward(self, x):
        return x


def failing():
    def fail(x):
        raise RuntimeError("broken on purpose")

    return Fn("Fail", fail)


def x_of(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def all_layers(layer):
    yield layer
    for s in layer.sublayers:
        yield from all_layers(s)


def tracers_in(layer):
    return [
        (each.name, attribute)
        for each in all_layers(layer)
        for attribute, value in vars(each).items()
        for leaf in jax.tree.leaves(value)
        if isinstance(leaf, jax.core.Tracer)
    ]


# --- Errors -------------------------------------------------------------------------


def test_error_tells_path_shapes_place_and_cause():
    model = Serial(Affine(4), Residual(Serial(Affine(4), Affine(4, name="ff"))))
    model.init(ShapeDtype((2, 4)))
    weights = model.weights
    ff = model.sublayers[1].sublayers[0].sublayers[1].sublayers[1].sublayers[1]
    ff.weights = (jnp.zeros((5, 4)), jnp.zeros(4))
    with pytest.raises(LayerError) as e:
        model(x_of(2, 4))
    error = e.value
    assert error.layer_name == "ff"
    assert error.path == (
        "Serial[1] > Serial[0] > Serial[1] > Parallel[1] > Serial[1] > Affine 'ff'"
    )
    assert error.function_name == "pure_fn"
    assert error.created_at.split("/")[-1].startswith("test_base.py:")
    assert error.got == ShapeDtype((2, 4))
    assert error.expected == ShapeDtype((2, 4))
    assert error.weights_signature == (ShapeDtype((5, 4)), ShapeDtype((4,)))
    assert error.cause.startswith("TypeError: dot_general")
    assert error.__cause__ is not None and "dot_general" in str(error.__cause__)
    for part in (error.path, error.created_at, error.cause, "(5, 4)"):
        assert part in str(error)
    ff.weights = weights[1][0][1][1][1]
    model(x_of(2, 4))


def test_error_hints():
    model = Serial(Affine(4))
    with pytest.raises(LayerError, match="init"):
        model(x_of(2, 4))
    with pytest.raises(LayerError) as e:
        Affine(4)(x_of(2, 4))
    assert "no weights yet" in e.value.hint
    model.init(ShapeDtype((2, 4)))
    with pytest.raises(LayerError) as e:
        model(x_of(4))  # A vector still multiplies; five features do not.
        model(x_of(5))
    assert "rank" in e.value.hint
    assert e.value.expected == ShapeDtype((2, 4)) and e.value.got == ShapeDtype((5,))
    with pytest.raises(LayerError) as e:
        model(x_of(2, 5))
    assert e.value.hint is None
    assert "initialised for: ShapeDtype{shape:(2, 4)" in str(e.value)


def test_error_in_init_names_the_layer():
    model = Serial(Affine(3), Branch(None, FailsToInit()))
    with pytest.raises(LayerError) as e:
        model.init(ShapeDtype((2, 4)))
    assert e.value.function_name == "init"
    assert e.value.path == "Serial[1] > Serial[1] > Parallel[1] > FailsToInit"
    assert e.value.got == ShapeDtype((2, 3))
    assert e.value.cause == "RuntimeError: no weights today"
    assert isinstance(e.value.__cause__, RuntimeError)


def test_error_of_a_shared_layer_names_the_place_that_failed():
    shared = Affine(4)
    model = Serial(shared, shared, Fn("Wide", lambda x: jnp.tile(x, 2)), shared)
    shared.weights = (jnp.zeros((4, 4)), jnp.zeros(4))
    weights = (shared.weights, GET_WEIGHTS_FROM_CACHE, (), GET_WEIGHTS_FROM_CACHE)
    state = ((), GET_STATE_FROM_CACHE, (), GET_STATE_FROM_CACHE)
    with pytest.raises(LayerError) as e:
        model.pure_fn(x_of(2, 4), weights, state, KEY)
    assert e.value.path == "Serial[3] > Affine_4"


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap", "eval_shape"])
def test_error_is_raised_once_and_leaves_no_tracer(how):
    model = Serial(Affine(4), Counter(), Serial(Noise(), failing()))
    good = Serial(Affine(4), Counter(), Serial(Noise(), Fn("Id", lambda x: x)))
    weights, state = good.init(ShapeDtype((2, 4)), rng=KEY)
    model.weights, model.state = weights, state

    def run(x):
        return model.pure_fn(x, weights, state, KEY)[0].sum()

    transform = {
        "eager": lambda f: f,
        "jit": jax.jit,
        "grad": jax.grad,
        "vmap": jax.vmap,
        "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
    }[how]
    with pytest.raises(LayerError) as e:
        transform(run)(x_of(2, 4))
    assert e.value.path == "Serial[2] > Serial[1] > Fail"
    assert isinstance(e.value.__cause__, RuntimeError)
    assert tracers_in(model) == []
    assert model.weights[0] is weights[0]
    assert model.state[1] is state[1]


def test_error_survives_pickling():
    with pytest.raises(LayerError) as e:
        Serial(failing()).init(ShapeDtype((2,)))
    again = pickle.loads(pickle.dumps(e.value))
    assert vars(again) == vars(e.value) and str(again) == str(e.value)


def test_wrong_numbers_of_inputs_and_outputs():
    add = Fn("Add", lambda a, b: a + b)
    with pytest.raises(LayerError, match="takes 2 inputs in a tuple or list, got one"):
        add(x_of(2))
    with pytest.raises(LayerError, match="takes 2 inputs, got 3"):
        add((x_of(2),) * 3)
    two = PureLayer(lambda x: (x, x, x), n_out=2, name="Two")
    with pytest.raises(
        LayerError, match=r"n_out=2 but forward\(\) returned 3 in a tuple"
    ):
        two(x_of(2))
    with pytest.raises(
        LayerError, match="NotImplementedError.*does not define forward"
    ):
        Layer()(x_of(2))


# --- Sharing ------------------------------------------------------------------------


def test_shared_layer_has_one_gradient_the_sum():
    shared = Affine(3)
    model = Serial(shared, Fn("Tanh", jnp.tanh), shared)
    x = x_of(5, 3)
    weights, state = model.init(signature(x), rng=KEY)
    assert weights[2] == GET_WEIGHTS_FROM_CACHE and state[2] == GET_STATE_FROM_CACHE
    grads = jax.grad(lambda w: model.pure_fn(x, w, state, None)[0].sum())(weights)
    assert len(jax.tree.leaves(grads)) == 2

    w, b = (np.asarray(a, np.float64) for a in weights[0])
    h = np.tanh(x @ w + b)
    d_y = np.ones((5, 3))
    d_pre = (d_y @ w.T) * (1 - h**2)
    np.testing.assert_allclose(grads[0][0], x.T @ d_pre + h.T @ d_y, rtol=1e-5)
    np.testing.assert_allclose(grads[0][1], d_pre.sum(0) + d_y.sum(0), rtol=1e-5)


def test_sharing_is_by_identity_not_by_equality():
    a, b = Affine(3), Affine(3)
    model = Serial(a, Serial(b, a), Branch(a, b))
    model.init(ShapeDtype((2, 3)), rng=KEY)
    assert len(jax.tree.leaves(model.weights)) == 4
    assert model.weights[1][1] == GET_WEIGHTS_FROM_CACHE
    assert [path for path, _ in tree.named_leaves(model, model.weights)] == [
        "0.Affine/0",
        "0.Affine/1",
        "1.Serial/0.Affine/0",
        "1.Serial/0.Affine/1",
    ]


def test_weights_set_by_the_tree_reach_all_places():
    shared = Affine(3)
    model = Serial(shared, shared)
    model.init(ShapeDtype((2, 3)))
    x = x_of(2, 3)
    model.weights = ((2 * np.eye(3, dtype=np.float32), np.zeros(3)), model.weights[1])
    np.testing.assert_allclose(model(x), 4 * x, rtol=1e-6)
    assert shared.weights[0][0, 0] == 2


@pytest.mark.parametrize("under_jit", [False, True])
def test_shared_state_keeps_the_last_update(under_jit):
    counter = Counter()
    model = Serial(counter, Serial(counter), counter)
    weights, state = model.init(ShapeDtype(()))
    run = jax.jit(model.pure_fn) if under_jit else model.pure_fn
    y, state = run(0.0, weights, state, KEY)
    assert float(y) == 1 + 2 + 3
    assert int(state[0]) == 3
    y, state = run(0.0, weights, state, KEY)
    assert float(y) == 4 + 5 + 6
    assert int(state[0]) == 6
    assert int(counter.state) == 0  # pure_fn changed nothing.
    model(0.0)
    assert int(counter.state) == 3


# --- Sublayers called as functions --------------------------------------------------


def test_sublayers_called_directly():
    model = Direct(Affine(3), Counter(), Affine(3))
    x = x_of(4, 3)
    weights, state = model.init(signature(x), rng=KEY)
    (w0, b0), _, (w1, b1) = (
        [np.asarray(a, np.float64) for a in part] for part in weights
    )
    expected = (x @ w0 + b0 + 1) @ w1 + b1
    for run in (model.pure_fn, jax.jit(model.pure_fn)):
        y, new_state = run(x, weights, state, KEY)
        np.testing.assert_allclose(y, expected, rtol=1e-4)
        assert int(new_state[1]) == 1
    assert int(model.state[1]) == 0
    model(x)
    assert int(model.state[1]) == 1
    nested = Serial(model, model)
    weights, state = nested.init(signature(x))
    _, state = nested.pure_fn(x, weights, state, KEY)
    assert int(state[0][1]) == 2
    grads = jax.grad(lambda w: nested.pure_fn(x, w, state, KEY)[0].sum())(weights)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_each_sublayer_called_directly_has_its_own_key():
    model = Direct(Noise(), Noise())
    model.init(ShapeDtype((3,)))
    x = jnp.zeros(3)
    keys = jax.random.split(KEY, 2)
    expected = sum(np.asarray(jax.random.normal(k, (3,))) for k in keys)
    y, _ = model.pure_fn(x, model.weights, model.state, KEY)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


# --- Init and keys ------------------------------------------------------------------


def test_init_under_jit_commits_nothing():
    model = Serial(Affine(3), Counter(), Affine(2))
    w, s = jax.jit(lambda k: model.init(ShapeDtype((2, 4)), rng=k))(KEY)
    assert tracers_in(model) == []
    assert jax.tree.leaves(model.weights) == []
    expected_w, expected_s = model.init(ShapeDtype((2, 4)), rng=KEY)
    for got, expected in ((w, expected_w), (s, expected_s)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got, expected)
    sigs = model.weights_and_state_signature(ShapeDtype((9, 5)))
    assert sigs[0][0] == (ShapeDtype((5, 3)), ShapeDtype((3,)))
    assert model.weights[0][0].shape == (4, 3)


def test_failing_init_keeps_the_old_weights():
    affine = Affine(3)
    affine.init(ShapeDtype((2, 4)), rng=KEY)
    old, old_rng = affine.weights, affine.rng
    with pytest.raises(LayerError):
        Serial(affine, FailsToInit()).init(ShapeDtype((2, 9)))
    assert affine.weights is old and affine.rng is old_rng


def test_same_key_gives_same_weights_and_another_key_others():
    def weights(key):
        return jax.tree.leaves(Serial(Affine(3), Affine(3)).init(sig, rng=key)[0])

    sig = ShapeDtype((1, 3))
    for a, b in zip(weights(KEY), weights(jax.random.key(7)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(weights(KEY), weights(jax.random.key(8)), strict=True):
        assert not np.array_equal(a, b)
    first, _, second, _ = weights(KEY)
    assert not np.array_equal(first, second)


def test_combinators_split_their_key_over_sublayers():
    model = Serial(Affine(3), Serial(Affine(3), Noise()))
    weights, _ = model.init(ShapeDtype((1, 3)), rng=KEY)
    k0, k1 = jax.random.split(KEY, 2)
    alone, _ = Affine(3).init(ShapeDtype((1, 3)), rng=k0)
    np.testing.assert_array_equal(weights[0][0], alone[0])
    k10, k11 = jax.random.split(k1, 2)
    alone, _ = Affine(3).init(ShapeDtype((1, 3)), rng=k10)
    np.testing.assert_array_equal(weights[1][0][0], alone[0])
    # Setting a layer's key splits it downwards the same way, as a running call does.
    other = Serial(Noise(), Serial(Noise()))
    other.rng = KEY
    assert jnp.array_equal(other.sublayers[0].rng, k0)
    other.init(ShapeDtype((2,)), rng=KEY)
    expected = jax.random.normal(k0, (2,)) + jax.random.normal(
        jax.random.split(k1, 1)[0], (2,)
    )
    np.testing.assert_allclose(other(jnp.zeros(2), rng=KEY), expected, rtol=1e-6)


def test_layers_without_a_key_follow_pythons_random():
    state = random.getstate()
    try:
        random.seed(3)
        a, _ = Affine(3).init(ShapeDtype((1, 3)))
        random.seed(3)
        b, _ = Affine(3).init(ShapeDtype((1, 3)))
        c, _ = Affine(3).init(ShapeDtype((1, 3)))
    finally:
        random.setstate(state)
    np.testing.assert_array_equal(a[0], b[0])
    assert not np.array_equal(a[0], c[0])


def test_init_again_gives_the_same_values_without_a_new_key():
    layer = Affine(3)
    a, _ = layer.init(ShapeDtype((1, 3)))
    layer.weights = (a[0] + 1, a[1])
    b, _ = layer.init(ShapeDtype((1, 3)))
    np.testing.assert_array_equal(a[0], b[0])


def test_calls_repeat_their_key_unless_given_one():
    noise = Noise()
    noise.init(ShapeDtype((3,)), rng=KEY)
    x = jnp.zeros(3)
    np.testing.assert_array_equal(noise(x), noise(x))
    assert not np.array_equal(noise(x), noise(x, rng=jax.random.key(1)))
    np.testing.assert_array_equal(noise(x), jax.random.normal(KEY, (3,)))


# --- Copies -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent_and_keep_sharing(how):
    shared = Affine(3)
    model = Serial(shared, Counter(), shared)
    model.init(ShapeDtype((2, 3)), rng=KEY)
    x = x_of(2, 3)
    other = (
        copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    )
    assert other.sublayers[0] is other.sublayers[2] is not shared
    y = model(x)
    assert int(model.state[1]) == 1 and int(other.state[1]) == 0
    np.testing.assert_array_equal(other(x), y)
    other.weights = jax.tree.map(jnp.zeros_like, other.weights)
    assert float(np.abs(model.weights[0][0]).max()) > 0
    assert repr(other) == repr(model)


# --- Setters ------------------------------------------------------------------------


def test_public_attributes_are_restricted():
    layer = Affine(3)
    with pytest.raises(ValueError, match="'units' cannot.*'_units'"):
        layer.units = 3
    with pytest.raises(ValueError, match="'n_in' cannot"):
        layer.n_in = 2
    layer._units = 3
    layer.state_sync = "mean"
    layer.trainable = False
    assert (layer.state_sync, layer.trainable, Affine(3).state_sync) == (
        "mean",
        False,
        None,
    )


def test_weights_setter_checks_the_length():
    model = Serial(Affine(3), Affine(3))
    model.init(ShapeDtype((2, 3)))
    with pytest.raises(
        ValueError,
        match=r"weight elements \(1\) does not equal.*sublayers \(2\) in: Serial",
    ):
        model.weights = (model.weights[0],)
    with pytest.raises(ValueError, match=r"state elements \(3\)"):
        model.state = ((), (), ())
    with pytest.raises(LayerError, match=r"weight elements \(3\)"):
        model.pure_fn(x_of(2, 3), ((), (), ()), model.state, None)


def test_setting_a_cache_marker_changes_nothing():
    layer = Affine(3)
    weights, _ = layer.init(ShapeDtype((2, 3)))
    layer.weights = GET_WEIGHTS_FROM_CACHE
    layer.state = GET_STATE_FROM_CACHE
    assert layer.weights is weights and layer.state == ()


def test_call_with_weights_and_state():
    model = Serial(Affine(3), Counter())
    model.init(ShapeDtype((2, 3)))
    x = x_of(2, 3)
    given = ((jnp.eye(3), jnp.zeros(3)), ())
    y = model(x, weights=given, state=((), jnp.array(10)))
    np.testing.assert_allclose(y, x + 11, rtol=1e-6)
    assert int(model.state[1]) == 11
    assert model.weights[0][0] is not given[0][0]


# --- Freezing -----------------------------------------------------------------------


def test_freeze_masks():
    shared = Affine(3)
    model = Serial(
        Affine(3), Freeze(Affine(3), Affine(3)), shared, Residual(Freeze(Affine(3)))
    )
    model.init(ShapeDtype((2, 3)))
    mask = tree.trainable_list(model, model.weights)
    assert mask == [True] * 2 + [False] * 4 + [True] * 2 + [False] * 2
    shared.trainable = False
    assert tree.trainable_list(model, model.weights)[6:8] == [False, False]
    model.trainable = False
    assert not any(tree.trainable_list(model, model.weights))
    single = Affine(3)
    assert Freeze(single) is single and not single.trainable


# --- What flows beside inputs -------------------------------------------------------


def test_apply_hands_out_emitted_values_and_context():
    class Tells(Layer):
        def forward(self, x):
            emit("seen", (data_axis(), row_mask()))
            return x

    model = Serial(Tells(), Serial(Tells()))
    weights, state = model.init(ShapeDtype((2,)))
    x, mask = x_of(2), np.array([1.0, 0.0])
    with batch_context(axis_name="b", row_mask=mask):
        y, _, emitted = model.apply(x, weights, state, None)
    assert [name for name, _ in emitted] == ["seen", "seen"]
    assert emitted[1][1][0] == "b" and emitted[1][1][1] is mask
    assert data_axis() is None and row_mask() is None
    np.testing.assert_array_equal(model(x), x)


def test_threads_do_not_see_each_other():
    model = Serial(Affine(3), Noise(), Counter(), Affine(3))
    x = x_of(2, 3)
    model.init(signature(x), rng=KEY)
    scaled = [jax.tree.map(lambda w, s=s: w * s, model.weights) for s in range(2)]
    expected = [model.pure_fn(x, w, model.state, KEY)[0] for w in scaled]
    start = threading.Barrier(2)
    wrong = []

    def work(i):
        start.wait()
        for _ in range(20):
            y, state = model.pure_fn(x, scaled[i], model.state, KEY)
            if not np.array_equal(y, expected[i]) or int(state[2]) != 1:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert not np.array_equal(expected[0], expected[1])


# --- Function layers ----------------------------------------------------------------


def test_fn_counts_arguments_and_refuses_others():
    assert (Fn("F", lambda a, b: (a, b), n_out=2).n_in, Fn("G", abs).n_in) == (2, 1)
    for bad, what in (
        (lambda a, b=1: a, "'b=1'"),
        (lambda *a: a, r"'\*a'"),
        (lambda a, **k: a, r"'\*\*k'"),
        (lambda a, *, k: a, "'k'"),
    ):
        with pytest.raises(ValueError, match=what):
            Fn("Bad", bad)


@pytest.mark.parametrize(
    ("n_in", "n_out", "text"),
    [(1, 1, "L"), (2, 1, "L_in2"), (1, 0, "L_out0"), (0, 3, "L_in0_out3")],
)
def test_repr_shows_arities_other_than_one(n_in, n_out, text):
    assert repr(Layer(n_in, n_out, name="L")) == text

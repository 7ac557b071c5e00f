"""Reversible layers against gradients and networks written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers.running import memory_context
from retrax.shapes import signature

KEY = jax.random.key(3)
WIDTH, ROWS = 4, 6


def block(rate=0.0):
    """A block of two half residuals, with all that may go wrong in reversing."""
    return [
        tl.ReversibleHalfResidual(
            tl.LayerNorm(), tl.Dense(WIDTH), tl.Tanh(), tl.Dropout(rate)
        ),
        tl.ReversibleSwap(),
        tl.ReversibleHalfResidual(
            tl.BatchNorm(axis=0, momentum=0.5), tl.Dense(WIDTH), tl.Tanh()
        ),
        tl.ReversibleSwap(),
    ]


def gradients(model, x, mode, jit=True):
    """((loss, new state), (gradients of the weights, of x)) in one memory mode."""

    def loss(weights, x):
        with memory_context(mode):
            y, state = model.pure_fn(x, weights, model.state, KEY)
        return sum(jnp.sum(jnp.sin(a) * a) for a in jax.tree.leaves(y)), state

    fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    return (jax.jit(fn) if jit else fn)(model.weights, x)


def largest_difference(a, b):
    """Of all leaves, relative to the largest number of each."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if x.dtype == jax.dtypes.float0 or not np.size(x):
            assert x.dtype == y.dtype and x.shape == y.shape
            continue
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        worst = max(worst, np.abs(x - y).max() / max(np.abs(x).max(), 1e-30))
    return worst


def made(*layers, x):
    model = tl.Serial(*layers)
    model.init(signature(x), rng=jax.random.key(0))
    return model


def inputs(dtype=np.float32):
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(dtype)


def n_bound(depth, eps):
    """The stated bound of docs/reversible.md for blocks with residuals of size 1."""
    return 32 * depth * eps


# --- Layers one by one ----------------------------------------------------------------


def test_layers_that_move_data_are_undone_by_reverse():
    x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones((3, 2))
    cases = [
        (tl.ReversibleSelect([1, 0, 1]), (x, y)),
        (tl.ReversibleSwap(), (x, y)),
        (tl.ReversibleReshape((3,), (1, 3)), x),
        (tl.ReversibleReshape((3, 2), (2, 3), n_in=2), (x, y)),
        (tl.ReversibleConcatenatePair(), (x, y)),
        (tl.ReversiblePrintShape(2, "here"), (x, y)),
        (tl.ReversibleSerial(tl.ReversibleSwap(), tl.ReversibleSwap()), (x, y)),
    ]
    for layer, given in cases:
        layer.init(signature(given))
        values = (layer.weights, layer.state, layer.state, None)
        out = layer.pure_fn(given, layer.weights, layer.state, None)[0]
        back = layer.reverse(out, *values)
        jax.tree.map(np.testing.assert_array_equal, back, given)
    one = tl.ReversibleReshape((3,), (1, 3))
    assert one(x).shape == (1, 3, 2)
    joined, again = tl.ReversibleConcatenatePair()((x, y))
    np.testing.assert_array_equal(joined, np.concatenate((x, y), -1))
    np.testing.assert_array_equal(joined, again)


def test_print_shape_prints(capsys):
    tl.ReversiblePrintShape(msg="here")(jnp.ones((2, 3)))
    assert capsys.readouterr().out == "PrintShape here: [(2, 3) float32]\n"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: tl.ReversibleSelect([0], n_in=2), ["drop [1]", "use select"]),
        (lambda: tl.ReversibleSelect([0, 3], n_in=2), ["drop [1]"]),
        (lambda: tl.ReversibleReshape((2, 3), (5,)), ["(2, 3) has 6", "(5,) has 5"]),
        (
            lambda: tl.ReversibleSerial(tl.ReversibleSwap(), tl.Dense(3)),
            ["sub-layer 1 of reversibleserial is not reversible", "dense_3"],
        ),
        (lambda: tl.ReversibleMomentumResidual(tl.Relu(), gamma=1.0), ["gamma", "1.0"]),
        (
            lambda: tl.ReversibleHalfResidual(attention_layer=tl.Dense(3)),
            ["forward_and_or_backward", "dense_3"],
        ),
        (lambda: tl.ReversibleHalfResidual(tl.Drop()), ["leave no output"]),
    ],
)
def test_what_cannot_be_reversed_is_refused_when_made(make, words):
    with pytest.raises((ValueError, TypeError)) as e:
        make()
    for word in words:
        assert word in str(e.value).lower()


def test_a_residual_of_another_shape_is_refused():
    half = tl.ReversibleHalfResidual(tl.Dense(1))
    with pytest.raises(LayerError, match=r"they give \(6, 1\), the top is \(6, 4\)"):
        half.init((signature(inputs()),) * 2)
    with pytest.raises(LayerError, match="of one shape"):
        tl.ReversibleConcatenatePair()((inputs(), inputs()[:, :2]))
    with pytest.raises(LayerError, match="leading axes are"):
        tl.ReversibleReshape((3,), (1, 3))(inputs())


def test_momentum_residual_is_the_formula_of_the_paper():
    x, v = inputs(np.float64), 0.3 * inputs(np.float64)[::-1]
    with jax.enable_x64(True):
        layer = tl.ReversibleMomentumResidual(tl.Tanh(), gamma=0.75)
        layer.init(signature((x, v)))
        y, new_v = layer((x, v))
        wanted_v = 0.75 * v + 0.25 * np.tanh(x)
        np.testing.assert_allclose(new_v, wanted_v, rtol=1e-14)
        np.testing.assert_allclose(y, x + wanted_v, rtol=1e-14)
        back = layer.reverse((y, new_v), layer.weights, layer.state)
        np.testing.assert_allclose(back[0], x, atol=1e-14)
        np.testing.assert_allclose(back[1], v, atol=1e-14)


class Fused(tl.Layer):
    """An attention layer that computes its gradients itself, and counts who asks."""

    calls: list = []

    def __init__(self):
        super().__init__(n_in=2)

    def init_weights_and_state(self, input_signature):
        self.weights = jnp.full((WIDTH,), 0.5)
        self.state = {"running_second_time": jnp.zeros(())}

    def forward(self, inputs):
        x, mask = inputs
        return jnp.tanh(x * self.weights) * mask

    def forward_and_or_backward(
        self,
        inputs,
        weights,
        state,
        rng,
        output_grad=None,
        compute_output=True,
        update_state=True,
    ):
        Fused.calls.append((compute_output, update_state, sorted(state)))
        x, mask = inputs
        y = jnp.tanh(x * weights)
        inner = output_grad * mask * (1 - y * y)
        return y * mask, state, (inner * weights, None), jnp.sum(inner * x, 0)


def test_a_layer_may_compute_output_and_gradients_at_once():
    mask = np.array([[1], [1], [0], [1], [0], [1]], np.int32)
    x = (inputs(), inputs()[::-1], mask)
    half = tl.ReversibleHalfResidual(tl.Dense(WIDTH), attention_layer=Fused())
    model = made(half, tl.ReversibleSwap(), x=x)
    Fused.calls.clear()
    fused = gradients(model, x, "reversible")
    assert Fused.calls == [(True, False, ["running_second_time_yes"])] * len(
        Fused.calls
    )
    assert Fused.calls
    assert largest_difference(gradients(model, x, "plain"), fused) < 1e-6


class Scale(tl.ReversibleLayer):
    """A user's own layer: forward and reverse only."""

    def init_weights_and_state(self, input_signature):
        self.weights = jnp.full((WIDTH,), 1.5)
        self.state = jnp.zeros(())

    def forward(self, x):
        self.state = self.state + 1
        noise = jax.random.normal(self.rng, x.shape)
        return x * self.weights + noise + self.state

    def reverse(self, output, weights=(), state=(), new_state=(), rng=None):
        return (output - jax.random.normal(rng, output.shape) - new_state) / weights


def test_own_layers_need_only_forward_and_reverse():
    x = inputs()
    model = made(tl.Dense(WIDTH), Scale(), Scale(), x=x)
    plain = gradients(model, x, "plain")
    assert largest_difference(plain, gradients(model, x, "reversible")) < 1e-6
    jaxpr = str(jax.make_jaxpr(lambda: gradients(model, x, "reversible", False))())
    assert " div " in jaxpr  # It was reversed.
    none = tl.ReversibleLayer()
    with pytest.raises(NotImplementedError, match=r"does not define reverse\(\)"):
        none.reverse(x)


def test_a_reverse_of_another_shape_is_named():
    class Wrong(Scale):
        def reverse(self, output, weights=(), state=(), new_state=(), rng=None):
            return output[:, :2]

    model = made(tl.Dense(WIDTH), Wrong(), x=inputs())
    with pytest.raises((LayerError, ValueError, TypeError)):
        gradients(model, inputs(), "reversible")


# --- Runs -----------------------------------------------------------------------------


def chains():
    shared = tl.Dense(WIDTH)
    zero = tl.Fn("Zero", lambda x: (x, jnp.zeros_like(x)), n_out=2)
    momentum = [
        tl.ReversibleMomentumResidual(tl.Dense(WIDTH), tl.Tanh(), tl.Dropout(0.2))
        for _ in range(3)
    ]
    masked = tl.ReversibleHalfResidual(
        tl.Fn("Masked", lambda x, m: x * m), tl.Dense(WIDTH), tl.Tanh()
    )
    return {
        "nested": [
            tl.Dense(WIDTH),
            tl.Dup(),
            tl.Serial(block(0.3), tl.Serial(block())),
        ],
        "repeat": [tl.Dup(), tl.Repeat(lambda: block(0.3), 3), tl.Add()],
        "repeat in a run": [tl.Dup(), block(), tl.Repeat(block, 2), block(0.5)],
        "serial": [tl.Dup(), tl.ReversibleSerial(block(0.3), block())],
        "momentum": [zero, momentum, tl.Select([0], n_in=2)],
        "shared": [
            shared,
            tl.Dup(),
            tl.ReversibleHalfResidual(shared, tl.Tanh()),
            tl.ReversibleSwap(),
            tl.ReversibleHalfResidual(tl.Dense(WIDTH), shared),
            tl.Add(),
            shared,
        ],
        "integers": [
            tl.Branch(None, None, tl.Fn("Mask", lambda x: (x > 0).astype(jnp.int32))),
            masked,
            tl.Select([1, 0, 2]),
            masked,
            tl.Repeat(
                lambda: [
                    tl.ReversibleHalfResidual(
                        tl.Fn("Masked", lambda x, m: x * m), tl.Dense(WIDTH)
                    ),
                    tl.ReversibleSwap(),
                ],
                2,
            ),
            tl.Select([0, 1], n_in=3),
        ],
    }


@pytest.mark.parametrize("name", chains())
def test_reversing_gives_the_gradients_and_states_of_keeping(name):
    x = inputs()
    model = made(chains()[name], x=x)
    plain = gradients(model, x, "plain")
    assert largest_difference(plain, gradients(model, x, "reversible")) < 5e-6
    if name in ("nested", "repeat"):
        assert largest_difference(plain, gradients(model, x, "remat")) < 1e-6


def by_hand(weights, x):
    """Two streams, two half residuals in each block; weights of all blocks stacked."""

    def one(streams, block):
        a, b = streams
        half1, _, half2, _ = block
        ((_, (w, c), _),) = half1
        a = a + jnp.tanh(b @ w + c)
        ((_, (w, c), _),) = half2
        b = b + jnp.tanh(a @ w + c)
        return (a, b), None

    return jax.lax.scan(one, (x, x), weights)[0]


@pytest.mark.parametrize(
    "depth, dtype",
    [(4, np.float32), (16, np.float32), (64, np.float32), (64, np.float64)],
)
def test_gradients_at_any_depth_are_those_of_a_network_written_out(depth, dtype):
    """Deep ones run under Repeat; the bound is linear in depth."""

    def half():
        middle = (tl.Fn("Same", lambda x: x), tl.Dense(WIDTH), tl.Tanh())
        return tl.ReversibleHalfResidual(*middle)

    def plain_block():
        return [half(), tl.ReversibleSwap(), half(), tl.ReversibleSwap()]

    def stacked(weights):
        if depth > 4:
            return weights[1]
        blocks = [weights[1 + 4 * i : 5 + 4 * i] for i in range(depth)]
        return jax.tree.map(lambda *ws: jnp.stack(ws), *blocks)

    with jax.enable_x64(dtype == np.float64):
        x = inputs(dtype)
        layers = [plain_block() for _ in range(depth if depth == 4 else 0)]
        deep = layers or tl.Repeat(plain_block, depth)
        model = made(tl.Dup(), deep, x=x)
        model.weights = jax.tree.map(
            lambda w: jnp.asarray(w, dtype) / np.sqrt(depth), model.weights
        )
        (value, _), (grads, grad_x) = gradients(model, x, "reversible")

        def loss(weights, x):
            streams = by_hand(stacked(weights), x)
            return sum(jnp.sum(jnp.sin(a) * a) for a in streams)

        wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(model.weights, x)
        bound = n_bound(depth, np.finfo(dtype).eps)
        assert largest_difference(wanted, (value, (grads, grad_x))) < bound


def temporary_bytes(model, x, mode):
    def loss(weights):
        with memory_context(mode):
            return jnp.sum(model.pure_fn(x, weights, model.state, KEY)[0][0])

    compiled = jax.jit(jax.grad(loss)).lower(model.weights).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("repeated", [True, False])
def test_memory_does_not_grow_with_depth(repeated):
    x = np.ones((2048, 32), np.float32)

    def one():
        half = tl.ReversibleHalfResidual(tl.Dense(32), tl.Tanh())
        return [half, tl.ReversibleSwap()]

    def deep(n):
        blocks = tl.Repeat(one, n) if repeated else [one() for _ in range(n)]
        return made(tl.Dup(), blocks, x=x)

    few, many = deep(5), deep(9)
    grown = {
        mode: temporary_bytes(many, x, mode) - temporary_bytes(few, x, mode)
        for mode in ("reversible", "plain")
    }
    # A compiler may choose to hold one array more or less, whatever the depth.
    assert grown["reversible"] < 1.1 * x.nbytes
    assert grown["plain"] > 3 * x.nbytes


def test_emitted_values_leave_a_run():
    x = inputs()
    half = tl.ReversibleHalfResidual(tl.SummaryScalar("size"), tl.Dense(WIDTH))
    model = made(tl.Dup(), half, tl.ReversibleSwap(), half, x=x)

    def loss(weights):
        y, _, emitted = model.apply(x, weights, model.state, KEY)
        return jnp.sum(y[0]), emitted

    _, emitted = jax.grad(loss, has_aux=True)(model.weights)
    assert len(emitted) == 2 and {name for name, _ in emitted} == {"summary_size"}
    np.testing.assert_allclose(emitted[0][1], x.mean(), rtol=1e-5)


def test_shared_state_is_differentiated_as_usual():
    """A BatchNorm in two places changes in order, so the run is not reversed."""
    x = inputs()
    norm = tl.BatchNorm(axis=0, momentum=0.5)
    halves = [tl.ReversibleHalfResidual(norm, tl.Dense(WIDTH)) for _ in range(2)]
    model = made(tl.Dup(), halves[0], tl.ReversibleSwap(), halves[1], x=x)
    plain = gradients(model, x, "plain")
    assert largest_difference(plain, gradients(model, x, "reversible")) < 1e-6


def test_reversing_works_under_vmap_and_twice():
    x = inputs()
    model = made(tl.Dup(), tl.ReversibleHalfResidual(tl.Tanh()), tl.Add(), x=x)

    def f(x):
        return jnp.sum(model.pure_fn(x, model.weights, model.state, None)[0] ** 2)

    def wanted(x):
        return jnp.sum((2 * x + jnp.tanh(x)) ** 2)

    xs = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(
        jax.vmap(jax.grad(f))(xs), jax.vmap(jax.grad(wanted))(xs), rtol=1e-5
    )
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
        jax.grad(lambda x: jnp.sum(jax.grad(wanted)(x) ** 2))(x),
        rtol=1e-4,
    )

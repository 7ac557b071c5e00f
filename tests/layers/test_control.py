"""Loops, choices, chunks and memory, against plain Python loops."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.errors import LayerError
from retrax.layers import tree
from retrax.layers.base import GET_WEIGHTS_FROM_CACHE, Fn, Layer, PureLayer
from retrax.layers.combinators import Freeze, Residual, Serial
from retrax.layers.control import (
    BatchLeadingAxes,
    Bidirectional,
    Cache,
    Chunk,
    Cond,
    Repeat,
    Scan,
)
from retrax.layers.stack_layers import Add, Multiply
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(5)


class Affine(Layer):
    def __init__(self, n):
        super().__init__(name=f"Affine_{n}")
        self._n = n

    def init_weights_and_state(self, input_signature):
        k_w, k_b = jax.random.split(self.rng)
        w = jax.random.normal(k_w, (input_signature.shape[-1], self._n))
        self.weights = (w / 2, jax.random.normal(k_b, (self._n,)))

    def forward(self, x):
        w, b = self.weights
        return x @ w + b


class Noise(Layer):
    def forward(self, x):
        return x + jax.random.normal(self.rng, x.shape)


class Dropout(Layer):
    def forward(self, x):
        return jnp.where(jax.random.bernoulli(self.rng, 0.5, x.shape), 2 * x, 0)


class Counter(Layer):
    state_sync = "same"

    def init_weights_and_state(self, input_signature):
        self.state = jnp.zeros((), jnp.int32)

    def forward(self, x):
        self.state = self.state + 1
        return x + self.state


def tanh():
    return Fn("Tanh", jnp.tanh)


def running_sum():
    return Fn("Sum", lambda x, total: (x + total, x + total), n_out=2)


def x_of(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_trees_close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


# --- Scan ---------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("remat", [False, True])
def test_scan_is_a_loop_along_the_axis(axis, remat):
    x = x_of(2, 3, 4)
    first = x_of(*np.delete(x.shape, axis), seed=1)
    scan = Scan(running_sum(), axis=axis, remat=remat)
    scan.init(signature((x, first)))
    assert (scan.n_in, scan.n_out) == (2, 2)
    ys, last = scan((x, first))
    expected = np.cumsum(x, axis) + np.expand_dims(first, axis)
    np.testing.assert_allclose(ys, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, np.take(expected, -1, axis), rtol=1e-5, atol=1e-6)
    assert scan.output_signature(signature((x, first))) == signature((ys, last))


def test_scan_with_weights_state_and_keys():
    cell = Serial(Affine(3), Noise(), Counter())
    scan = Scan(cell, axis=1, n_carry=0)
    x = x_of(2, 4, 3)
    weights, state = scan.init(signature(x), rng=KEY)
    y, new_state = jax.jit(scan.pure_fn)(x, weights, state, KEY)
    cell_state, expected = state[0], []
    for i in range(4):
        key = jax.random.fold_in(KEY, i)
        step, cell_state = cell.pure_fn(x[:, i], weights[0], cell_state, key)
        expected.append(step)
    np.testing.assert_allclose(y, np.stack(expected, 1), rtol=1e-5)
    assert int(new_state[0][2]) == 4 and new_state[1] == ()
    assert [p for p, _ in tree.named_leaves(scan, weights)] == [
        "0.Serial/0.Affine/0",
        "0.Serial/0.Affine/1",
    ]


@pytest.mark.parametrize("remat", [False, True])
def test_scan_gradient(remat):
    def step_fn(x, w, c):
        return jnp.tanh(x * w + c), jnp.tanh(x * w + c)

    scan = Scan(Fn("Step", lambda x, c: step_fn(x, 0.5, c), n_out=2), remat=remat)
    x, c = x_of(5, 2), x_of(2, seed=1)
    scan.init(signature((x, c)))

    def by_scan(x, c):
        ys, last = scan.pure_fn((x, c), scan.weights, scan.state, None)[0]
        return (ys**2).sum() + last.sum()

    def by_loop(x, c):
        total = 0.0
        for i in range(5):
            y, c = step_fn(x[i], 0.5, c)
            total += (y**2).sum()
        return total + c.sum()

    got = jax.grad(by_scan, (0, 1))(x, c)
    assert_trees_close(got, jax.grad(by_loop, (0, 1))(x, c), rtol=1e-5, atol=1e-6)


def test_scan_in_predict_mode_goes_on_where_it_stopped():
    x = x_of(6, 2)
    first = x_of(2, seed=1)
    scan = Scan(running_sum(), mode="predict")
    weights, state = scan.init(signature((x[:2], first)))
    run = jax.jit(scan.pure_fn)
    parts, ignored = [], first
    for i in range(3):
        structure = jax.tree.structure(state)
        (ys, last), state = run((x[2 * i : 2 * i + 2], ignored), weights, state, None)
        assert jax.tree.structure(state) == structure
        parts.append(ys)
        ignored = first + 100
    expected = np.cumsum(x, 0) + first
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state[1][1][0], expected[-1], rtol=1e-5, atol=1e-5)
    _, _ = scan.init(signature((x[:2], first)))
    np.testing.assert_allclose(
        scan((x[:2], first))[1], x[:2].sum(0) + first, rtol=1e-5, atol=1e-6
    )


def test_scan_in_train_mode_starts_anew():
    scan = Scan(running_sum())
    scan.init(signature((np.zeros(2, np.float32), np.float32(0))))
    x = np.ones(2, np.float32)
    assert float(scan((x, 0.0))[1]) == float(scan((x, 0.0))[1]) == 2.0


@pytest.mark.parametrize(
    ("layer", "inputs", "text"),
    [
        (
            lambda: Scan(Add(), n_carry=0),
            (np.zeros((2, 3)), np.zeros((4, 3))),
            r"one size along axis 0, got \[2, 4\]",
        ),
        (
            lambda: Scan(Add(), axis=1, n_carry=0),
            (np.zeros((2, 3)), np.zeros(3)),
            r"along axis 1, but input 1 has the shape \(3,\)",
        ),
        (
            lambda: Scan(Fn("Wide", lambda x, c: (x, jnp.tile(c, 2)), n_out=2)),
            (np.zeros((2, 3), np.float32), np.zeros(3, np.float32)),
            r"carry 0 \(of 1\).*expected ShapeDtype\{shape:\(3,\), dtype:float32\}, "
            r"got ShapeDtype\{shape:\(6,\)",
        ),
        (
            lambda: Scan(
                Fn("Cast", lambda x, c, d: (x, c, d.astype(jnp.int32)), n_out=3),
                n_carry=2,
            ),
            (np.zeros((2,), np.float32), np.float32(1), np.float32(1)),
            r"carry 1 \(of 2\).*dtype:float32\}, got .*dtype:int32",
        ),
        (
            lambda: Scan(Fn("Flat", lambda x: x.sum()), axis=1, n_carry=0),
            np.zeros((2, 3), np.float32),
            r"cannot stack outputs of shape \(\) along axis 1",
        ),
    ],
)
def test_scan_explains_mistakes(layer, inputs, text):
    layer = layer()
    with pytest.raises(LayerError, match=text):
        layer.init(signature(inputs))
    if "stack outputs" not in text:
        with pytest.raises(LayerError, match=text):
            layer.pure_fn(inputs, ((),), ((), ()), None)


def test_scan_refuses_arities_that_cannot_be():
    for n_carry in (-1, 1, 2):
        with pytest.raises(ValueError, match=rf"Scan\(n_carry={n_carry}\).*n_in=1"):
            Scan(tanh(), n_carry=n_carry)


def test_scan_inside_scan():
    inner = Scan(running_sum(), axis=0)
    outer = Scan(inner, axis=0)
    x, c = x_of(3, 4), np.float32(0)
    outer.init(signature((x, c)))
    ys, last = outer((x, c))
    np.testing.assert_allclose(ys, np.cumsum(x).reshape(3, 4), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last, x.sum(), rtol=1e-4)


# --- Sharing between loops and their surroundings -----------------------------------


def test_weights_can_be_shared_with_a_loop():
    shared = Affine(3)
    x = x_of(2, 4, 3)
    for model in (
        Serial(shared, tanh(), Scan(shared, axis=1, n_carry=0)),
        Serial(Scan(shared, axis=1, n_carry=0), tanh(), shared),
        Serial(shared, tanh(), Chunk(shared, 1)),
        Serial(shared, tanh(), Cond(Fn("Yes", lambda: True), shared, Serial())),
        Serial(shared, tanh(), BatchLeadingAxes(Serial(shared))),
        Serial(shared, tanh(), Cache(shared)),
    ):
        weights, state = model.init(signature(x), rng=KEY)
        assert len(jax.tree.leaves(weights)) == 2
        w, b = jax.tree.leaves(weights)

        def plain(wb):
            return jnp.tanh(x @ wb[0] + wb[1]) @ wb[0] + wb[1]

        y, _ = model.pure_fn(x, weights, state, KEY)
        np.testing.assert_allclose(y, plain((w, b)), rtol=1e-5, atol=1e-5)
        grads = jax.grad(lambda w, m=model, s=state: m.pure_fn(x, w, s, KEY)[0].sum())(
            weights
        )
        expected = jax.grad(lambda wb: plain(wb).sum())((w, b))
        assert_trees_close(
            tuple(jax.tree.leaves(grads)), expected, rtol=1e-4, atol=1e-4
        )


def test_shared_state_that_a_loop_would_lose_is_refused():
    shared = Counter()
    x = np.zeros(3, np.float32)
    for model in (
        Serial(shared, Scan(shared, n_carry=0)),
        Serial(shared, Cond(Fn("Yes", lambda: True), shared)),
        Cond(Fn("Yes", lambda: True), Serial(shared), shared),
    ):
        with pytest.raises(LayerError, match="Counter changes its state inside"):
            model.init(signature(x))
            model(x)
    inside = Scan(Serial(shared, shared), n_carry=0)
    inside.init(signature(x))
    np.testing.assert_array_equal(inside(x), [1 + 2, 3 + 4, 5 + 6])
    assert int(inside.state[0][0]) == 6


# --- Cond ---------------------------------------------------------------------------


def branches(chosen):
    true = Serial(Affine(3), Counter())
    return Cond(Fn("Chosen", lambda c: c > 0), true, Affine(3)), np.float32(chosen)


@pytest.mark.parametrize("chosen", [1.0, -1.0])
@pytest.mark.parametrize("under_jit", [False, True])
def test_cond_runs_the_chosen_branch_and_keeps_both_states(chosen, under_jit):
    cond, c = branches(chosen)
    x = x_of(2, 3)
    weights, state = cond.init(signature((c, x)), rng=KEY)
    assert (cond.n_in, cond.n_out) == (2, 1)
    run = jax.jit(cond.pure_fn) if under_jit else cond.pure_fn
    y, state = run((c, x), weights, state, KEY)
    w, b = weights[1][0] if chosen > 0 else weights[2]
    np.testing.assert_allclose(y, x @ w + b + (chosen > 0), rtol=1e-5)
    assert int(state[1][1]) == (chosen > 0)
    assert len(weights) == len(state) == 3


def test_cond_on_a_longer_stack():
    cond = Cond(Fn("P", lambda c: c), Add(), Multiply())
    a, b, z = x_of(3), x_of(3, seed=1), x_of(2, seed=2)
    for chosen, expected in ((True, a + b), (False, a * b)):
        c = np.bool_(chosen)
        cond.init(signature((c, a, b)))
        y, below = cond((c, a, b, z))
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        np.testing.assert_array_equal(below, z)
        in_serial = Serial(cond)
        in_serial.init(signature((c, a, b, z)))
        y, below = in_serial((c, a, b, z))
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        np.testing.assert_array_equal(below, z)


def test_cond_takes_sizes_of_one_and_branches_with_several_outputs():
    cond = Cond(
        Fn("P", lambda c: c),
        PureLayer(lambda x: [x, 2 * x], n_out=2, name="List"),
        PureLayer(lambda x: (3 * x, x), n_out=2, name="Tuple"),
    )
    for c in (np.ones((1, 1), np.int32), np.float32(2)):
        cond.init(signature((c, np.float32(1))))
        assert [float(y) for y in cond((c, 1.0))] == [1, 2]
    assert [float(y) for y in cond((0.0, 1.0))] == [3, 1]
    with pytest.raises(
        LayerError, match=r"has to give one value, got the shape \(2,\)"
    ):
        cond((np.ones(2), np.float32(1)))


def test_cond_gradient_reaches_only_the_chosen_branch():
    cond, c = branches(-1.0)
    x = x_of(2, 3)
    weights, state = cond.init(signature((c, x)), rng=KEY)
    grads = jax.grad(lambda w: cond.pure_fn((c, x), w, state, None)[0].sum())(weights)
    assert all(not np.any(g) for g in jax.tree.leaves(grads[1]))
    np.testing.assert_allclose(grads[2][0], x.T @ np.ones((2, 3)), rtol=1e-5)


def test_cond_explains_mistakes():
    p = Fn("P", lambda c: c)
    with pytest.raises(ValueError, match="Add has n_in=2, n_out=1; Serial has n_in=1"):
        Cond(p, Add())
    with pytest.raises(ValueError, match="one output; Two has 2"):
        Cond(Fn("Two", lambda c: (c, c), n_out=2), tanh())
    with pytest.raises(LayerError, match=r"Affine_4 gives .*4\).*Serial gives .*3\)"):
        Cond(p, Affine(4)).init(signature((np.bool_(True), x_of(2, 3))))


# --- Chunk, BatchLeadingAxes, Cache, Bidirectional ----------------------------------


@pytest.mark.parametrize("n_rows", [6, 5, 0])
def test_chunk_computes_the_same(n_rows):
    layer = Serial(Affine(4), tanh())
    chunked = Chunk(layer, 2)
    x = x_of(n_rows, 3)
    weights, state = chunked.init(signature(x), rng=KEY)
    y, _ = chunked.pure_fn(x, weights, state, None)
    w, b = jax.tree.leaves(weights)
    np.testing.assert_allclose(y, np.tanh(x @ w + b), rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda w: chunked.pure_fn(x, w, state, None)[0].sum())(weights)
    expected = jax.grad(lambda wb: jnp.tanh(x @ wb[0] + wb[1]).sum())((w, b))
    assert_trees_close(tuple(jax.tree.leaves(grads)), expected, rtol=1e-4, atol=1e-5)


def test_chunk_of_several_inputs_and_its_refusals():
    chunked = Chunk(Fn("Both", lambda a, b: (a + b, a), n_out=2), 2)
    a, b = x_of(4, 3), x_of(4, 3, seed=1)
    chunked.init(signature((a, b)))
    y, same = chunked((a, b))
    np.testing.assert_allclose(y, a + b, rtol=1e-6)
    np.testing.assert_array_equal(same, a)
    layer = tanh()
    assert Chunk(layer, 0) is layer
    strict = Chunk(layer, 2, pass_unchunkable=False)
    with pytest.raises(LayerError, match="batch of 5 rows into chunks of 2"):
        strict.init(ShapeDtype((5, 3)))
    with pytest.raises(ValueError, match="Chunk needs a layer with inputs; None_"):
        Chunk(Layer(n_in=0, name="None_"), 2)


@pytest.mark.parametrize("n_keep", [0, 1, 2, 3])
def test_batch_leading_axes(n_keep):
    seen = []

    def note(x):
        seen.append(x.shape)
        return 2 * x

    layer = BatchLeadingAxes(Fn("Note", note), n_keep)
    x = x_of(2, 3, 4)
    layer.init(signature(x))
    np.testing.assert_allclose(layer(x), 2 * x)
    shapes = {0: (24,), 1: (6, 4), 2: (2, 3, 4), 3: (1, 2, 3, 4)}
    assert set(seen) == {shapes[n_keep]}
    assert layer.output_signature(signature(x)) == signature(x)


def test_batch_leading_axes_with_weights_and_several_tensors():
    layer = BatchLeadingAxes(Affine(5))
    x = x_of(2, 3, 4)
    (weights,), _ = layer.init(signature(x))
    np.testing.assert_allclose(layer(x), x @ weights[0] + weights[1], rtol=1e-5)
    swap = BatchLeadingAxes(Fn("Swap", lambda a, b: (b, a), n_out=2))
    a, b = x_of(2, 3, 4), x_of(2, 3, 5)
    swap.init(signature((a, b)))
    assert [y.shape for y in swap((a, b))] == [(2, 3, 5), (2, 3, 4)]
    with pytest.raises(LayerError, match=r"got \[\(2, 3, 4\), \(3, 3, 4\)\]"):
        swap((a, x_of(3, 3, 4)))
    with pytest.raises(LayerError, match=r"got \[\(3,\)\]"):
        BatchLeadingAxes(tanh(), 2).init(ShapeDtype((3,)))


def test_cache_computes_once():
    layer = Cache(Serial(Counter(), Noise()))
    x = x_of(3)
    weights, state = layer.init(signature(x), rng=KEY)
    run = jax.jit(layer.pure_fn)
    first, kept = run(x, weights, state, KEY)
    again, kept = run(x + 1, weights, kept, jax.random.key(0))
    np.testing.assert_array_equal(first, again)
    assert int(kept[0][0]) == 1
    other, _ = run(x + 1, weights, state, KEY)
    np.testing.assert_allclose(other, first + 1, rtol=1e-5)
    two = Cache(Fn("Two", lambda x: (x, 2 * x), n_out=2))
    two.init(signature(x))
    assert [y.shape for y in two(x)] == [y.shape for y in two(x + 1)] == [(3,), (3,)]


def test_bidirectional_runs_a_copy_backwards():
    cell = Serial(Affine(3), Fn("Cumsum", lambda x: jnp.cumsum(x, 1)), name="Recurrent")
    layer = Bidirectional(cell)
    x = x_of(2, 4, 3)
    layer.init(signature(x), rng=KEY)
    forward, backward = layer.sublayers[0].sublayers[1].sublayers
    (w0, b0), (w1, b1) = forward.weights[0], backward.sublayers[1].weights[0]
    assert not np.array_equal(w0, w1)
    there = np.cumsum(x @ w0 + b0, 1)
    back = np.cumsum((x @ w1 + b1)[:, ::-1], 1)[:, ::-1]
    np.testing.assert_allclose(
        layer(x), np.concatenate([there, back], -1), rtol=1e-4, atol=1e-5
    )
    summed = Bidirectional(copy.deepcopy(cell), merge_layer=Add())
    summed.init(signature(x), rng=KEY)
    assert summed(x).shape == (2, 4, 3)
    merges = [Bidirectional(tanh()).sublayers[1] for _ in range(2)]
    assert merges[0] is not merges[1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Scan(running_sum()), "Scan_in2_out2[\n  Sum_in2_out2\n]"),
        (
            lambda: Cond(Fn("P", lambda x: x > 0), tanh()),
            "Cond_in2[\n  P\n  Tanh\n  Serial\n]",
        ),
        (
            lambda: Chunk(tanh(), 2),
            "Serial[\n  ReshapeToChunks\n  Scan[\n    Tanh\n  ]\n"
            "  ReshapeFromChunks\n]",
        ),
        (lambda: Cache(tanh()), "Cache[\n  Tanh\n]"),
        (lambda: BatchLeadingAxes(tanh()), "BatchLeadingAxes[\n  Tanh\n]"),
        (
            lambda: Bidirectional(Affine(4)),
            "Serial[\n  Branch_out2[\n    Affine_4\n    Serial[\n"
            "      _FlipAlongTimeAxis\n      Affine_4\n      _FlipAlongTimeAxis\n"
            "    ]\n  ]\n  Concatenate_in2\n]",
        ),
        (lambda: Repeat(tanh, 3), "Repeat_3[\n  Tanh\n]"),
        (lambda: Repeat(tanh, 3, name="Body"), "Body[\n  Tanh\n]"),
    ],
)
def test_prints(make, text):
    # All but Repeat were recorded from Trax 1.4.1 (function layers renamed).
    assert str(make()) == text


# --- Repeat -------------------------------------------------------------------------


def shared_block():
    shared = Affine(4)
    return Serial(shared, tanh(), shared)


def two_tensor_block():
    return Fn("Mix", lambda a, b: (jnp.tanh(a + b), a * b), n_out=2)


BLOCKS = {
    "residual": lambda: Residual(Affine(4), tanh(), Noise(), Counter()),
    "shared": shared_block,
    "list": lambda: [Affine(4), tanh()],
    "single": lambda: Affine(4),
    "noise": Noise,
    "dropout": lambda: Serial(Dropout(), Fn("Add1", lambda x: x + 1), Dropout()),
    "nested": lambda: Repeat(lambda: Residual(Affine(4), Noise()), 2),
    "scan": lambda: Scan(Serial(Affine(4), Noise()), n_carry=0),
    "two": two_tensor_block,
}


def pair(name, n=3, **options):
    block = BLOCKS[name]
    repeat = Repeat(block, n, **options)
    serial = Serial(
        *[Serial(b) if isinstance(b := block(), list) else b for _ in range(n)]
    )
    x = x_of(2, 4)
    x = (x, x_of(2, 4, seed=1)) if name == "two" else x
    repeat.init(signature(x), rng=KEY)
    serial.init(signature(x), rng=KEY)
    return repeat, serial, x


@pytest.mark.parametrize(
    ("name", "remat"), [*((name, False) for name in BLOCKS), ("residual", True)]
)
def test_repeat_equals_serial_of_equal_blocks(name, remat):
    repeat, serial, x = pair(name, remat=remat)
    for i in range(3):
        assert_trees_close(repeat.block_weights(i), serial.weights[i], rtol=0)
        assert_trees_close(repeat.block_state(i), serial.state[i], rtol=0)

    def run(model):
        def loss(weights):
            y, s = model.pure_fn(x, weights, model.state, jax.random.key(9))
            return sum(jnp.sum(a**2) for a in jax.tree.leaves(y)), (y, s)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(model.weights)

    (_, (y, state)), grads = run(repeat)
    (_, (y_serial, state_serial)), grads_serial = run(serial)
    assert_trees_close(y, y_serial, rtol=1e-6, atol=1e-6)
    for i in range(3):

        def of(tree, i=i):
            return jax.tree.map(lambda a: a[i], tree)

        assert_trees_close(of(state), state_serial[i], rtol=1e-6)
        scale = max([1.0, *(float(np.abs(g).max()) for g in jax.tree.leaves(grads))])
        assert_trees_close(of(grads), grads_serial[i], rtol=1e-6, atol=1e-6 * scale)


def test_repeat_with_dropout_is_exactly_serial():
    # Whole numbers, so that rounding cannot hide or make a difference.
    repeat, serial, _ = pair("dropout")
    x = np.ones((8, 4), np.float32)
    key = jax.random.key(9)
    y, _ = repeat.pure_fn(x, repeat.weights, repeat.state, key)
    expected, _ = serial.pure_fn(x, serial.weights, serial.state, key)
    np.testing.assert_array_equal(y, expected)
    other, _ = repeat.pure_fn(x, repeat.weights, repeat.state, jax.random.key(8))
    assert not np.array_equal(y, other)
    assert 0 < np.mean(np.asarray(y) == 0) < 1


def test_repeat_names_marks_and_declarations_go_through_the_block():
    frozen = Freeze(Affine(4))
    repeat = Repeat(lambda: Serial(Affine(4), frozen, Counter()), 3)
    model = Serial(Affine(4), repeat)
    weights, state = model.init(ShapeDtype((2, 4)))
    assert [(p, w.shape) for p, w in tree.named_leaves(model, weights)] == [
        ("0.Affine/0", (4, 4)),
        ("0.Affine/1", (4,)),
        ("1.Repeat/block.Serial/0.Affine/0", (3, 4, 4)),
        ("1.Repeat/block.Serial/0.Affine/1", (3, 4)),
        ("1.Repeat/block.Serial/1.Affine/0", (3, 4, 4)),
        ("1.Repeat/block.Serial/1.Affine/1", (3, 4)),
    ]
    assert tree.trainable_list(model, weights) == [True] * 4 + [False] * 2
    assert tree.state_sync_list(model, state) == [
        ("1.Repeat/block.Serial/2.Counter", "same")
    ]
    again = tree.rebuild(model, weights, dict(tree.named_leaves(model, weights)))
    assert jax.tree.structure(again) == jax.tree.structure(weights)


def test_repeat_reads_and_sets_single_blocks():
    repeat, _, x = pair("single")
    new = (jnp.eye(4), jnp.zeros(4))
    old = repeat.block_weights(1)
    repeat.set_block_weights(2, new)
    assert_trees_close(repeat.block_weights(2), new, rtol=0)
    assert_trees_close(repeat.block_weights(1), old, rtol=0)
    (w0, b0), (w1, b1) = repeat.block_weights(0), repeat.block_weights(1)
    expected = (x @ w0 + b0) @ w1 + b1
    np.testing.assert_allclose(repeat(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no block 3: they go from 0 to 2"):
        repeat.block_weights(3)
    with pytest.raises(ValueError, match="no block -1"):
        repeat.block_state(-1)
    with pytest.raises(
        ValueError, match=r"0: expected float32\(4, 4\), got float32\(5"
    ):
        repeat.set_block_weights(0, (jnp.zeros((5, 4)), jnp.zeros(4)))


def test_repeat_takes_a_layer_as_a_pattern():
    pattern = Affine(4)
    repeat = Repeat(pattern, 2, unroll=5)
    repeat.init(ShapeDtype((2, 4)), rng=KEY)
    assert repeat.block is pattern and pattern.weights == () and repeat.n == 2
    first, second = repeat.block_weights(0)[0], repeat.block_weights(1)[0]
    assert not np.array_equal(first, second)
    assert not Repeat(tanh, 2).has_weights and repeat.has_weights


def test_repeat_shared_as_a_whole():
    repeat = Repeat(lambda: Affine(4), 2)
    model = Serial(repeat, tanh(), repeat)
    x = x_of(2, 4)
    weights, state = model.init(signature(x))
    assert weights[2] == GET_WEIGHTS_FROM_CACHE
    y, _ = model.pure_fn(x, weights, state, None)
    once = Serial(repeat, tanh())
    once_y, _ = once.pure_fn(x, weights[:2], state[:2], None)
    expected, _ = repeat.pure_fn(once_y, weights[0], state[0], None)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_repeat_refuses_sharing_with_its_surroundings():
    shared = Affine(4)
    inside = Repeat(lambda: Serial(shared, tanh()), 2)
    for model in (Serial(shared, inside), Serial(inside, Serial(shared))):
        with pytest.raises(
            LayerError, match="Affine_4 is used both inside and outside"
        ):
            model.init(ShapeDtype((2, 4)))
    twice = Serial(inside, Repeat(lambda: Serial(shared, tanh()), 2))
    with pytest.raises(LayerError, match="Affine_4 is used both"):
        twice.init(ShapeDtype((2, 4)))


def test_repeat_explains_mistakes():
    with pytest.raises(ValueError, match="Add has n_in=2, n_out=1"):
        Repeat(Add, 2)
    with pytest.raises(ValueError, match="n >= 1 and unroll >= 1, got 0, 1"):
        Repeat(tanh, 0)
    with pytest.raises(TypeError, match="Repeat: item 0 is no layer but 3"):
        Repeat(lambda: 3, 2)
    with pytest.raises(LayerError, match=r"Affine_5 takes .*4\).* and gives .*5\)"):
        Repeat(Affine(5), 2).init(ShapeDtype((2, 4)))
    repeat = Repeat(lambda: Serial(Affine(4), Fn("Fail", lambda x: 1 / 0)), 2)
    with pytest.raises(LayerError) as e:
        Serial(repeat).init(ShapeDtype((2, 4)))
    assert e.value.path == "Serial[0] > Repeat[block] > Serial[1] > Fail"
    with pytest.raises(LayerError, match="Call init"):
        Repeat(lambda: Serial(Affine(4), tanh()), 2)(x_of(2, 4))


def test_repeat_inits_under_a_trace_to_the_same_values():
    repeat, serial, x = pair("residual")
    sig = signature(x)
    weights, _ = jax.jit(lambda k: repeat.init(sig, rng=k))(KEY)
    assert_trees_close(weights, repeat.weights, rtol=1e-6)
    sigs = Repeat(lambda: Residual(Affine(4)), 7).weights_and_state_signature(sig)
    shapes = [s.shape for s in jax.tree.leaves(sigs[0])]
    assert shapes == [(7, 4, 4), (7, 4)]


def test_repeat_traces_one_block_however_many_there_are():
    traced = []

    def note(x):
        traced.append(1)
        return jnp.tanh(x)

    counts, sizes = [], []
    for n in (2, 50):
        model = Repeat(lambda: Residual(Affine(4), Fn("Note", note)), n)
        weights, state = model.init(ShapeDtype((2, 4)))
        traced.clear()
        jaxpr = jax.make_jaxpr(model.pure_fn)(x_of(2, 4), weights, state, KEY)
        counts.append(len(traced))
        sizes.append(len(str(jaxpr)))
    assert counts[0] == counts[1]
    assert sizes[1] < 1.2 * sizes[0]

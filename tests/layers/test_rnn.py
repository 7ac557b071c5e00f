"""Recurrent layers against cells and loops written out in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers import rnn, rnn_cells
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(3)
LAYERS = {"lstm": rnn.LSTM, "gru": rnn.GRU, "sru": rnn.SRU}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(layer, *inputs, seed=1):
    """Initialises a layer, then fills all weights with values of size about 0.5."""
    sigs = [signature(x) for x in inputs]
    weights, _ = layer.init(sigs[0] if len(sigs) == 1 else tuple(sigs), rng=KEY)
    rng = np.random.default_rng(seed)
    layer.weights = jax.tree.map(
        lambda w: jnp.asarray(rng.normal(size=w.shape) * 0.5, w.dtype), weights
    )
    return layer


def arrays(layer):
    return [np.asarray(w, np.float64) for w in jax.tree.leaves(layer.weights)]


def give_weights(layer, source):
    """Gives a layer the weights of another, in their order."""
    leaves = jax.tree.leaves(source.weights)
    layer.weights = jax.tree.unflatten(jax.tree.structure(layer.weights), leaves)


# --- The oracles --------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_step(x, state, w, b):
    n = state.shape[-1] // 2
    c, h = state[:, :n], state[:, n:]
    y = x @ w[: x.shape[-1]] + h @ w[x.shape[-1] :] + b
    i, j, f, o = (y[:, k * n : (k + 1) * n] for k in range(4))
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(j)
    h = sigmoid(o) * np.tanh(c)
    return h, np.concatenate([c, h], axis=1)


def gru_step(x, h, w1, b1, w2, b2):
    d, n = x.shape[-1], h.shape[-1]
    gates = sigmoid(x @ w1[:d] + h @ w1[d:] + b1)
    u, r = gates[:, :n], gates[:, n:]
    h = u * h + (1 - u) * np.tanh(x @ w2[:d] + (r * h) @ w2[d:] + b2)
    return h, h


def loop(step, x, state, *weights, mask=None):
    """Runs row by row, so that padded steps can simply be left out."""
    ys = np.zeros((*x.shape[:2], 0))
    last = []
    for row in range(x.shape[0]):
        s, outputs = state[row : row + 1], []
        y = s[:, -(s.shape[1] // (2 if step is lstm_step else 1)) :]
        for t in range(x.shape[1]):
            if mask is None or mask[row, t]:
                y, s = step(x[row : row + 1, t].astype(np.float64), s, *weights)
            outputs.append(y[0])
        ys = np.zeros((*x.shape[:2], len(y[0]))) if row == 0 else ys
        ys[row] = outputs
        last.append(s[0])
    return ys, np.array(last)


def sru(x, weights, activation=lambda c: c):
    w, b, *highway = weights
    x = x.astype(np.float64)
    n = w.shape[1] // 3
    rfu = x @ w + b
    r, f, u = sigmoid(rfu[..., :n]), sigmoid(rfu[..., n : 2 * n]), rfu[..., 2 * n :]
    x = x @ highway[0] if highway else x
    c, ys = np.zeros((x.shape[0], n)), []
    for t in range(x.shape[1]):
        c = f[:, t] * c + (1 - f[:, t]) * u[:, t]
        ys.append(r[:, t] * activation(c) + (1 - r[:, t]) * x[:, t] * 3**0.5)
    return np.stack(ys, axis=1)


STEPS = {"lstm": (lstm_step, 2), "gru": (gru_step, 1)}
recurrent = pytest.mark.parametrize("kind", ["lstm", "gru"])
every = pytest.mark.parametrize("kind", ["lstm", "gru", "sru"])


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


# --- Formulas -----------------------------------------------------------------------


@recurrent
@pytest.mark.parametrize("d_in, n", [(3, 7), (7, 3), (4, 4)])
def test_outputs_and_last_state_are_those_of_the_written_out_cell(kind, d_in, n):
    step, multiple = STEPS[kind]
    x = normal(2, 5, d_in)
    layer = make(LAYERS[kind](n, return_state=True), x)
    ys, last = loop(step, x, np.zeros((2, multiple * n)), *arrays(layer))
    y, state = layer(x)
    assert y.shape == (2, 5, n) and state.shape == (2, multiple * n)
    close(y, ys)
    close(state, last)


@recurrent
def test_cells_make_one_step(kind):
    step, multiple = STEPS[kind]
    cell = rnn_cells.LSTMCell(4) if kind == "lstm" else rnn_cells.GRUCell(4)
    x, state = normal(3, 2), normal(3, 4 * multiple, seed=5)
    make(cell, x, state)
    y, new = cell((x, state))
    wanted_y, wanted = step(x.astype(np.float64), state, *arrays(cell))
    close(y, wanted_y)
    close(new, wanted)


@pytest.mark.parametrize("d_in", [3, 4])
@pytest.mark.parametrize("activation", [None, tl.Tanh])
def test_sru_is_the_written_out_one(d_in, activation):
    x = normal(2, 5, d_in)
    layer = make(rnn.SRU(4, activation() if activation else None), x)
    # W, b, and a matrix for the highway only where the sizes differ.
    assert len(arrays(layer)) == (2 if d_in == 4 else 3)
    close(layer(x), sru(x, arrays(layer), np.tanh if activation else lambda c: c))


@every
def test_the_number_of_units_is_not_that_of_the_inputs(kind):
    x = normal(2, 5, 3)
    assert make(LAYERS[kind](7), x)(x).shape == (2, 5, 7)
    assert make(tl.Bidirectional(LAYERS[kind](4)), x)(x).shape == (2, 5, 8)


def test_bidirectional_joins_both_directions():
    x = normal(2, 5, 3)
    layer = make(tl.Bidirectional(rnn.GRU(4)), x)
    there, back = arrays(layer)[:4], arrays(layer)[4:]
    zeros = np.zeros((2, 4))
    forward, _ = loop(gru_step, x, zeros, *there)
    backward, _ = loop(gru_step, x[:, ::-1], zeros, *back)
    close(layer(x), np.concatenate([forward, backward[:, ::-1]], axis=-1))


def test_initial_weights_are_those_of_trax():
    x = ShapeDtype((2, 5, 60))
    w, b = jax.tree.leaves(rnn.LSTM(100).init(x, rng=KEY)[0])
    assert w.shape == (160, 400)
    np.testing.assert_allclose(w.var(), 2 / (160 + 400), rtol=0.05)
    np.testing.assert_allclose(b, np.ones(400), atol=1e-4)  # Of all four gates.
    w1, b1, w2, b2 = jax.tree.leaves(rnn.GRU(100).init(x, rng=KEY)[0])
    assert (w1.shape, w2.shape) == ((160, 200), (160, 100))
    assert 0.0099 < abs(w1).max() <= 0.01 and 0.0099 < abs(w2).max() <= 0.01
    assert 0 < abs(b1).max() < 1e-4 and 0 < abs(b2).max() < 1e-4
    cell = rnn_cells.GRUCell(4, forget_bias=2.0)
    _, b1, _, b2 = cell.init((ShapeDtype((2, 3)), ShapeDtype((2, 4))), rng=KEY)[0]
    np.testing.assert_allclose(b1, np.full(8, 2.0), atol=1e-4)
    np.testing.assert_allclose(b2, np.zeros(4), atol=1e-4)


@recurrent
def test_gradients_are_those_of_the_oracle_in_float64(kind):
    step, multiple = STEPS[kind]
    x32, zeros = normal(2, 4, 3), np.zeros((2, multiple * 2))
    layer = make(LAYERS[kind](2), x32)
    weights, treedef = arrays(layer), jax.tree.structure(layer.weights)

    def wanted_loss(values):
        return np.sum(np.sin(loop(step, values[0], zeros, *values[1:])[0]))

    values = [x32.astype(np.float64), *weights]
    with jax.enable_x64(True):

        def loss(values):
            tree = jax.tree.unflatten(treedef, values[1:])
            y, _ = layer.pure_fn(values[0], tree, layer.state, None)
            assert y.dtype == jnp.float64
            return jnp.sum(jnp.sin(y))

        as_jax = [jnp.asarray(v) for v in values]
        close(loss(as_jax), wanted_loss(values))
        grads = [np.asarray(g) for g in jax.grad(loss)(as_jax)]
    rng = np.random.default_rng(7)
    for _ in range(8):  # Along random directions, by central differences.
        v = [rng.normal(size=a.shape) for a in values]
        ahead = wanted_loss([a + 1e-6 * d for a, d in zip(values, v, strict=True)])
        behind = wanted_loss([a - 1e-6 * d for a, d in zip(values, v, strict=True)])
        got = sum(np.sum(g * d) for g, d in zip(grads, v, strict=True))
        np.testing.assert_allclose(got, (ahead - behind) / 2e-6, rtol=1e-6)


# --- States from and to the stack ---------------------------------------------------


@recurrent
def test_a_sequence_in_two_parts_is_the_whole(kind):
    x, multiple = normal(2, 6, 3), STEPS[kind][1]
    whole = make(LAYERS[kind](4, return_state=True), x)
    y, state = whole(x)
    zeros = np.zeros((2, 4 * multiple), np.float32)
    part = LAYERS[kind](4, return_state=True, initial_state=True)
    assert (part.n_in, part.n_out) == (2, 2)
    only = LAYERS[kind](4, initial_state=True)
    for layer in part, only:
        layer.init((signature(x), signature(zeros)))
        give_weights(layer, whole)
    first, middle = part((x[:, :2], zeros))
    second, last = part((x[:, 2:], middle))
    close(np.concatenate([first, second], axis=1), y)
    close(last, state)
    close(only((x[:, 2:], middle)), second)


# --- Padding ------------------------------------------------------------------------


MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "between": [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0]],
}


@recurrent
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_padded_steps_are_as_if_left_out(kind, mask, dtype):
    step, multiple = STEPS[kind]
    x, mask = normal(2, 5, 3), np.array(mask, dtype)
    layer = make(LAYERS[kind](4, return_state=True, use_mask=True), x, mask)
    zeros = np.zeros((2, 4 * multiple))
    ys, last = loop(step, x, zeros, *arrays(layer), mask=mask)
    y, state = layer((x, mask))
    close(y, ys)
    close(state, last)
    x[mask == 0] = np.nan
    close(layer((x, mask))[0], ys)


def test_sru_leaves_out_padded_steps():
    x, mask = normal(2, 5, 3), np.array(MASKS["between"][:1] * 2, bool)
    layer = make(rnn.SRU(4, use_mask=True), x, mask)
    close(layer((x, mask))[:, mask[0]], sru(x[:, mask[0]], arrays(layer)))


@every
def test_bidirectional_with_padding_starts_at_the_last_real_step(kind):
    x, mask = normal(2, 5, 3), np.array([[1, 1, 1, 0, 0]] * 2, bool)
    layer = make(tl.Bidirectional(LAYERS[kind](4, use_mask=True)), x, mask)
    plain = tl.Bidirectional(LAYERS[kind](4))
    plain.init(ShapeDtype((2, 3, 3)))
    give_weights(plain, layer)
    close(layer((x, mask))[:, :3], plain(x[:, :3]))


def test_masked_layers_stack():
    x, mask = normal(2, 5, 3), np.array(MASKS["right"], bool)
    layers = [rnn.LSTM(4, use_mask=True), rnn.GRU(2, use_mask=True)]
    model = make(tl.Serial(tl.Select([0, 1, 1]), *layers), x, mask)
    w, b, *gru = arrays(model)
    hidden, _ = loop(lstm_step, x, np.zeros((2, 8)), w, b, mask=mask)
    wanted, _ = loop(gru_step, hidden, np.zeros((2, 2)), *gru, mask=mask)
    close(model((x, mask)), wanted)


# --- Mode 'predict' -----------------------------------------------------------------


def block(kind, mode):
    if kind == "repeat":
        return tl.Repeat(lambda: [rnn.LSTM(3, mode=mode), tl.Tanh()], 2)
    if kind == "masked":
        ones = tl.Fn("Ones", lambda x: jnp.ones(x.shape[:2]))
        return tl.Serial(tl.Branch(None, ones), rnn.GRU(3, mode=mode, use_mask=True))
    return LAYERS[kind](3, mode=mode)


@pytest.mark.parametrize("kind", ["lstm", "gru", "sru", "repeat", "masked"])
def test_predict_mode_gives_what_eval_mode_gives(kind):
    x = normal(2, 6, 3)
    whole = make(block(kind, "eval"), x)
    wanted = whole(x)
    model = block(kind, "predict")
    weights, state = model.init(ShapeDtype((2, 1, 3)))
    model.weights = whole.weights
    run = jax.jit(model.pure_fn)

    def in_parts(state):
        ys = []
        for a, b in [(0, 3), (3, 4), (4, 5), (5, 6)]:
            y, state = run(x[:, a:b], model.weights, state, None)
            ys.append(y)
        return np.concatenate(ys, axis=1), state

    got, used = in_parts(state)
    close(got, wanted)
    again, _ = in_parts(used)  # The state is in use: it does not start again.
    assert np.max(np.abs(again - wanted)) > 1e-3
    model.state = used
    model.reset_state()
    again, _ = in_parts(model.state)
    np.testing.assert_array_equal(again, got)


@recurrent
def test_predict_mode_names_the_batch_it_was_made_for(kind):
    model = make(LAYERS[kind](3, mode="predict"), normal(2, 1, 3))
    with pytest.raises(LayerError, match=r"\(2, \d\).*\(5, \d\)"):
        model(normal(5, 1, 3))


# --- Dtypes -------------------------------------------------------------------------


@every
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("w_dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes_promote_as_in_dense(kind, x_dtype, w_dtype):
    x = normal(2, 5, 3)
    layer = make(LAYERS[kind](4), x)
    exact = layer(x)
    layer.weights = jax.tree.map(lambda w: w.astype(w_dtype), layer.weights)
    y = layer(jnp.asarray(x, x_dtype))
    assert y.dtype == jnp.promote_types(x_dtype, w_dtype)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, atol=0.1)


@recurrent
def test_states_made_here_are_float32_in_bfloat16_models(kind):
    x = jnp.asarray(normal(2, 5, 3), jnp.bfloat16)
    layer = make(LAYERS[kind](4, return_state=True), x)
    layer.weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer.weights)
    y, state = layer(x)
    assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32


# --- General cells ------------------------------------------------------------------


def test_general_gru_cell_is_its_formula():
    s = normal(3, 4)
    cell = rnn_cells.GeneralGRUCell(
        lambda: tl.Dense(4), lambda: tl.Fn("Twice", lambda x: 2 * x), mode="eval"
    )
    make(cell, s)
    wu, bu, wr, br, wc, bc = arrays(cell)
    u, r = sigmoid(s @ wu + bu + 0.5), sigmoid(s @ wr + br + 0.5)
    close(cell(s), u * 2 * s + (1 - u) * np.tanh((r * s) @ wc + bc))


def test_general_gru_cell_takes_its_options():
    s = normal(3, 4)
    cell = rnn_cells.GeneralGRUCell(
        lambda: tl.Dense(4),
        gate_nonlinearity=tl.HardSigmoid,
        candidate_nonlinearity=tl.Relu,
        sigmoid_bias=-1.0,
        mode="eval",
    )
    make(cell, s)
    wu, bu, wr, br, wc, bc = arrays(cell)
    hard = make(tl.HardSigmoid(), s)
    u, r = (np.asarray(hard(s @ w + b - 1)) for w, b in ((wu, bu), (wr, br)))
    close(cell(s), u * s + (1 - u) * np.maximum((r * s) @ wc + bc, 0))


def test_general_gru_cell_drops_in_training_only():
    s = normal(3, 4)
    keys = [jax.random.key(i) for i in range(2)]
    for mode in "train", "eval":
        cell = rnn_cells.GeneralGRUCell(
            lambda: tl.Dense(4), dropout_rate_c=0.5, mode=mode
        )
        make(cell, s)
        a, b = (cell(s, rng=key) for key in keys)
        assert bool(jnp.all(a == b)) == (mode == "eval")


def convolve_same(x, w, b):
    """3 x 3 windows, zeros around."""
    height, width = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = np.zeros((*x.shape[:3], w.shape[-1])) + b
    for i in range(3):
        for j in range(3):
            y += padded[:, i : i + height, j : j + width] @ w[i, j]
    return y


def test_conv_gru_cell_is_its_formula():
    s = normal(2, 4, 5, 3)
    cell = make(rnn_cells.ConvGRUCell(3, mode="eval"), s)
    wu, bu, wr, br, wc, bc = arrays(cell)
    assert wu.shape == (3, 3, 3, 3)
    u = sigmoid(convolve_same(s, wu, bu) + 0.5)
    r = sigmoid(convolve_same(s, wr, br) + 0.5)
    close(cell(s), u * s + (1 - u) * np.tanh(convolve_same(r * s, wc, bc)))


# --- Errors and prints --------------------------------------------------------------


def test_bad_input_is_named():
    for kind in LAYERS.values():
        with pytest.raises(ValueError, match="n_units of at least 1, got 0"):
            kind(0)
    x = ShapeDtype((2, 5, 3))
    with pytest.raises(LayerError, match=r"\(batch, length, depth\), got \(2, 3\)"):
        rnn.LSTM(4).init(ShapeDtype((2, 3)))
    with pytest.raises(LayerError, match=r"4 units .* \(\.\.\., 8\), .* \(2, 7\)"):
        rnn.LSTM(4, initial_state=True).init((x, ShapeDtype((2, 7))))
    with pytest.raises(LayerError, match=r"4 units .* \(\.\.\., 4\), .* \(2, 7\)"):
        rnn.GRU(4, initial_state=True).init((x, ShapeDtype((2, 7))))
    with pytest.raises(LayerError, match=r"axis 1, got \[5, 4\]"):
        rnn.GRU(4, use_mask=True).init((x, ShapeDtype((2, 4))))
    with pytest.raises(LayerError, match=r"\(3,\) does not fit .* \(2, 3\)"):
        rnn.GRU(4, use_mask=True).init((x, ShapeDtype((3, 5))))
    with pytest.raises(LayerError, match=r"\(2, 4\) does not fit .* \(2, 5, 4\)"):
        rnn.SRU(4, use_mask=True).init((x, ShapeDtype((2, 4))))


def test_names_are_those_of_trax():
    assert [str(kind(7)) for kind in LAYERS.values()] == ["LSTM_7", "GRU_7", "SRU_7"]
    assert str(rnn.GRU(7, use_mask=True, return_state=True)) == "GRU_7_in2_out2"
    assert rnn.LSTM(7, name="encoder").name == "encoder"

"""Dense, Embedding, Dropout and the layers around them."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers.running import batch_context
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(layer, x, rng=KEY):
    layer.init(signature(x), rng=rng)
    return layer


# --- Dense --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_dense_is_the_affine_map_of_its_weights(shape):
    x = normal(*shape)
    layer = make(tl.Dense(5, bias_initializer=tl.RandomNormalInitializer(1.0)), x)
    w, b = (np.asarray(a, np.float64) for a in layer.weights)
    assert w.shape == (4, 5) and b.shape == (5,)
    np.testing.assert_allclose(layer(x), x @ w + b, rtol=1e-5, atol=1e-5)


def test_dense_without_bias_holds_the_bare_matrix():
    x = normal(3, 4)
    layer = make(tl.Dense(5, use_bias=False), x)
    assert layer.weights.shape == (4, 5)
    np.testing.assert_allclose(layer(x), x @ np.asarray(layer.weights), rtol=1e-5)


def test_dense_splits_its_key_into_one_for_each_weight():
    drawn = {}

    def initializer(name):
        def init(shape, rng):
            drawn[name] = jax.random.key_data(rng)
            return jnp.zeros(shape)

        return init

    make(tl.Dense(5, initializer("w"), initializer("b")), normal(3, 4))
    wanted = jax.random.key_data(jax.random.split(KEY, 2))
    np.testing.assert_array_equal(drawn["w"], wanted[0])
    np.testing.assert_array_equal(drawn["b"], wanted[1])


def test_dense_default_initial_scales_are_glorots():
    w, b = make(tl.Dense(300), normal(1, 500)).weights
    assert np.std(w) == pytest.approx(np.sqrt(2 / 800), rel=0.02)
    assert 0.5e-6 < np.std(b) < 2e-6


def test_dense_keeps_bfloat16_weights():
    layer = make(tl.Dense(5, use_bfloat16=True), normal(3, 4))
    assert {w.dtype for w in layer.weights} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("n_units", [0, -3])
def test_dense_refuses_sizes_below_one(n_units):
    with pytest.raises(ValueError, match=f"got {n_units}"):
        tl.Dense(n_units)


def test_dense_refuses_a_scalar_input():
    with pytest.raises(LayerError, match="got a scalar"):
        tl.Dense(2).init(ShapeDtype(()))


# --- Embedding ----------------------------------------------------------------------


def test_embedding_takes_rows_and_compiled_code_clips_ids():
    ids = np.array([[0, 2], [9, -4]])
    layer = make(tl.Embedding(3, 2), ids)
    w = np.asarray(layer.weights)
    np.testing.assert_array_equal(layer(ids[:1]), w[[[0, 2]]])
    run = jax.jit(lambda ids: layer.pure_fn(ids, w, (), None)[0])
    np.testing.assert_array_equal(run(ids), w[[[0, 2], [2, 0]]])


@pytest.mark.parametrize("wrong", [3, -1])
def test_embedding_names_an_id_out_of_the_vocabulary(wrong):
    layer = make(tl.Embedding(3, 2), np.zeros((2, 2), np.int32))
    text = f"ids 0 to 2, but 1 of 4 ids are outside, the first of them {wrong};"
    with pytest.raises(LayerError, match=text):
        layer(np.array([[0, 2], [1, wrong]], np.int32))


def test_embedding_initial_variance_is_one_over_features():
    w = make(tl.Embedding(2000, 50), np.zeros(1, np.int32)).weights
    assert np.var(w) == pytest.approx(1 / 50, rel=0.02)
    assert np.max(np.abs(w)) <= np.sqrt(3 / 50)


def test_embedding_refuses_float_ids():
    with pytest.raises(LayerError, match="Embedding needs integer ids, got float32;"):
        make(tl.Embedding(3, 2), np.zeros((2,), np.int32))(np.zeros(2, np.float32))


def test_embedding_gradient_is_the_count_of_each_id():
    ids = np.array([0, 2, 2])
    layer = make(tl.Embedding(3, 2), ids)
    grad = jax.grad(lambda w: layer.pure_fn(ids, w, (), None)[0].sum())(layer.weights)
    np.testing.assert_array_equal(grad, [[1, 1], [0, 0], [2, 2]])


def test_bfloat16_embedding_gives_float32():
    layer = make(tl.Embedding(3, 2, use_bfloat16=True), np.zeros(1, np.int32))
    assert layer.weights.dtype == jnp.bfloat16
    assert layer(np.array([1])).dtype == jnp.float32


# --- Dropout ------------------------------------------------------------------------


def drop(layer, x, seed=0):
    return np.asarray(layer.pure_fn(x, (), (), jax.random.key(seed))[0])


def test_dropout_drops_at_its_rate_and_keeps_the_mean():
    x = np.ones((200, 500), np.float32)
    y = drop(tl.Dropout(0.3), x)
    n_dropped = (y == 0).sum()
    # 100,000 draws: five standard deviations are 725.
    assert abs(n_dropped - 30_000) < 725
    np.testing.assert_allclose(y[y != 0], 1 / 0.7, rtol=1e-6)


def test_dropout_shares_its_mask_along_axes():
    x = normal(4, 50, 6)
    dropped = drop(tl.Dropout(0.5, shared_axes=[0, -1]), x) == 0
    assert (dropped == dropped[:1, :, :1]).all()
    assert 0 < dropped[0, :, 0].sum() < 50


def test_dropout_depends_on_the_key_only():
    x, layer = normal(10, 10), tl.Dropout(0.5)
    np.testing.assert_array_equal(drop(layer, x, 1), drop(layer, x, 1))
    assert (drop(layer, x, 1) != drop(layer, x, 2)).any()


@pytest.mark.parametrize("mode", ["eval", "predict", "viz"])
def test_dropout_is_the_identity_outside_of_training(mode):
    x = normal(3, 4)
    assert tl.Dropout(0.9, mode=mode).pure_fn(x, (), (), None)[0] is x


def test_dropout_of_rate_zero_needs_no_key():
    x = normal(3, 4)
    assert tl.Dropout(0.0).pure_fn(x, (), (), None)[0] is x


def test_dropout_lets_no_non_finite_value_through_what_it_drops():
    x = np.full((100,), np.inf, np.float32)
    y = drop(tl.Dropout(0.5), x)
    assert not np.isnan(y).any() and (y == 0).any()


def test_dropout_keeps_half_precision():
    x = jnp.ones((4, 4), jnp.bfloat16)
    assert tl.Dropout(0.5).pure_fn(x, (), (), KEY)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_dropout_refuses_rates_that_are_none(rate):
    with pytest.raises(ValueError, match=rf"\[0, 1\), got {rate}"):
        tl.Dropout(rate)


def test_dropout_without_a_key_says_what_to_do():
    with pytest.raises(LayerError, match="Dropout needs a random key.*rng=None"):
        tl.Dropout(0.5).pure_fn(normal(2), (), (), None)


# --- Weights, RandomUniform, SummaryScalar ------------------------------------------


def test_weights_puts_its_weight_on_the_stack():
    layer = tl.Weights(tl.RandomNormalInitializer(1.0), shape=(2, 3))
    weights, state = layer.init((), rng=KEY)
    assert weights.shape == (2, 3) and state == ()
    np.testing.assert_array_equal(layer(()), weights)


def test_weights_work_beside_other_layers():
    x = normal(4, 3)
    model = make(tl.Branch(tl.Weights(tl.RandomNormalInitializer(), 2), tl.Dense(5)), x)
    assert [y.shape for y in model(x)] == [(2,), (4, 5)]


def test_random_uniform_stays_in_its_range():
    layer = tl.RandomUniform(2.0, 4.0, shape=(5000,))
    y = np.asarray(layer.pure_fn((), (), (), KEY)[0])
    assert y.min() >= 2 and y.max() < 4
    assert y.mean() == pytest.approx(3.0, abs=5 * 2 / np.sqrt(12 * 5000))


def test_random_uniform_draws_integers():
    layer = tl.RandomUniform(1, 4, shape=(200,), dtype=jnp.int32)
    y = np.asarray(layer.pure_fn((), (), (), KEY)[0])
    assert y.dtype == np.int32 and set(y) == {1, 2, 3}


@pytest.mark.parametrize("sync", [False, True])
def test_random_uniform_syncs_devices_if_asked(sync):
    layer = tl.RandomUniform(shape=(3,), sync=sync)

    def on_device(rng):
        with batch_context("batch"):
            return layer.pure_fn((), (), (), rng)[0]

    y = jax.vmap(on_device, axis_name="batch")(jax.random.split(KEY, 2))
    assert bool(jnp.all(y[0] == y[1])) == sync
    np.testing.assert_array_equal(
        y[0], jax.random.uniform(jax.random.split(KEY, 2)[0], (3,))
    )


def test_summary_scalar_emits_and_passes_its_input_on():
    x = normal(3, 4)
    model = make(tl.Serial(tl.SummaryScalar("act"), tl.SummaryScalar("m", jnp.max)), x)
    y, _, emitted = model.apply(x, model.weights, model.state, None)
    np.testing.assert_array_equal(y, x)
    assert [name for name, _ in emitted] == ["summary_act", "summary_m"]
    np.testing.assert_allclose(emitted[0][1], x.mean(), rtol=1e-4)
    np.testing.assert_allclose(emitted[1][1], x.max())


# --- LocallyConnected1d -------------------------------------------------------------


def locally_connected(x, w, b, padding):
    """The definition as a loop over the places of input and kernel, in float64."""
    length, k = w.shape[:2]
    y = np.zeros((*x.shape[:-1], w.shape[-1]))
    for place in range(length):
        for i in range(k):
            to = place + i - (k - 1) // 2
            if padding == "WRAP":
                to %= length
            if 0 <= to < length:
                y[..., to, :] += x[..., place, :].astype(np.float64) @ w[place, i]
    if padding == "VALID":
        y = y[..., (k - 1) // 2 : length - (k - 1) // 2, :]
    return y + b


@pytest.mark.parametrize("padding", ["VALID", "SAME", "WRAP"])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_locally_connected_is_its_definition(padding, kernel_size):
    x = normal(2, 6, 4)
    layer = tl.LocallyConnected1d(
        5, kernel_size, padding=padding, bias_initializer=tl.RandomNormalInitializer(1)
    )
    w, b = (np.asarray(a, np.float64) for a in make(layer, x).weights)
    assert w.shape == (6, kernel_size, 4, 5)
    y = locally_connected(x, w, b, padding)
    np.testing.assert_allclose(layer(x), y, rtol=1e-5, atol=1e-5)
    n_places = 6 - kernel_size + 1 if padding == "VALID" else 6
    assert b.shape == (n_places, 5) and layer(x).shape == (2, n_places, 5)


def test_locally_connected_with_equal_kernels_is_a_convolution():
    x, kernel = normal(1, 7, 1), normal(3, seed=1)
    layer = make(tl.LocallyConnected1d(1, 3, use_bias=False, padding="SAME"), x)
    layer.weights = jnp.broadcast_to(kernel[None, :, None, None], (7, 3, 1, 1))
    wanted = np.convolve(x[0, :, 0], kernel, mode="same")
    np.testing.assert_allclose(layer(x)[0, :, 0], wanted, rtol=1e-5, atol=1e-5)


def test_locally_connected_initial_scale_leaves_out_the_places():
    layer = make(tl.LocallyConnected1d(40, 3, use_bias=False), normal(1, 50, 20))
    assert np.var(layer.weights) == pytest.approx(2 / (3 * 60), rel=0.03)


def test_locally_connected_takes_plain_initializers():
    layer = tl.LocallyConnected1d(2, 3, lambda shape, rng: jnp.ones(shape))
    assert (make(layer, normal(1, 4, 2)).weights[0] == 1).all()


@pytest.mark.parametrize(
    "make_layer, text",
    [
        (lambda: tl.LocallyConnected1d(4, 2), "odd kernel_size, got 2"),
        (lambda: tl.LocallyConnected1d(4, 3, padding="same"), "got 'same'"),
        (lambda: make(tl.LocallyConnected1d(4, 3), normal(2, 4)[0]), "length, d_in"),
        (lambda: make(tl.LocallyConnected1d(4, 5), normal(4, 2)), "does not fit"),
    ],
)
def test_locally_connected_refuses(make_layer, text):
    with pytest.raises(ValueError, match=text):
        make_layer()


# --- Layers made of functions -------------------------------------------------------


@pytest.mark.parametrize(
    "layer, f",
    [
        (tl.Mean(), lambda x: x.mean(-1)),
        (tl.Mean(axis=1, keepdims=True), lambda x: x.mean(1, keepdims=True)),
        (tl.Max(axis=0), lambda x: x.max(0)),
        (tl.Min(keepdims=True), lambda x: x.min(-1, keepdims=True)),
        (tl.Sum(), lambda x: x.sum()),
        (tl.Sum(axis=(0, 1)), lambda x: x.sum((0, 1))),
        (tl.ArgMax(), lambda x: x.argmax(-1)),
        (tl.ArgMax(axis=1), lambda x: x.argmax(1)),
        (tl.Negate(), lambda x: -x),
        (tl.ToFloat(), lambda x: x),
        (tl.ThresholdToBinary(), lambda x: np.where(x > 0.5, 1, 0)),
        (tl.Flatten(), lambda x: x.reshape(2, 12)),
        (tl.Flatten(2), lambda x: x),
        (tl.Flatten(0), lambda x: x.reshape(24)),
        (tl.LogSumExp(), lambda x: np.log(np.exp(x).sum(-1, keepdims=True))),
        (tl.LogSoftmax(), lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))),
        (tl.LogSoftmax(axis=1), lambda x: x - np.log(np.exp(x).sum(1, keepdims=True))),
        (tl.Softmax(), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
        (tl.StopGradient(), lambda x: x),
    ],
    ids=lambda value: repr(value) if isinstance(value, tl.Layer) else "numpy",
)
def test_function_layers_compute_what_numpy_does(layer, f):
    x = normal(2, 3, 4)
    wanted = f(x.astype(np.float64))
    y = layer(x)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_softmax_is_safe_for_large_scores():
    x = np.array([1e4, 1e4 + 1.0], np.float32)
    np.testing.assert_allclose(np.exp(tl.LogSoftmax()(x)), tl.Softmax()(x), rtol=1e-6)
    np.testing.assert_allclose(tl.Softmax()(x).sum(), 1.0, rtol=1e-6)
    assert np.isfinite(tl.LogSumExp()(x)).all()


def test_stop_gradient_stops():
    layer = tl.StopGradient()
    grad = jax.grad(lambda x: (layer.pure_fn(x, (), (), None)[0] ** 2).sum())
    np.testing.assert_array_equal(grad(jnp.ones(3)), np.zeros(3))


def test_to_float_converts_integers():
    assert tl.ToFloat()(np.array([1, 2])).dtype == jnp.float32


@pytest.mark.parametrize("n", [1, 2, 5])
def test_shift_right_moves_along_axis_one(n):
    x = normal(2, 4, 3)
    y = np.asarray(tl.ShiftRight(n)(x))
    wanted = np.zeros_like(x)
    wanted[:, n:] = x[:, : max(4 - n, 0)]
    np.testing.assert_array_equal(y, wanted)


def test_shift_right_keeps_integers_and_is_the_identity_in_predict():
    ids = np.array([[5, 6, 7]])
    y = tl.ShiftRight()(ids)
    assert y.tolist() == [[0, 5, 6]] and jnp.issubdtype(y.dtype, jnp.integer)
    assert tl.ShiftRight(mode="predict")(ids).tolist() == [[5, 6, 7]]


@pytest.mark.parametrize(
    "layer, x, text",
    [
        (tl.Flatten(2), np.zeros((2, 3)), r"more than 2 axes, got shape \(2, 3\)"),
        (tl.ShiftRight(), np.zeros(3), r"\(batch, length, ...\), got \(3,\)"),
    ],
    ids=repr,
)
def test_function_layers_refuse_ranks_they_cannot_take(layer, x, text):
    with pytest.raises(LayerError, match=text):
        layer(x)


def test_print_shape_prints_when_traced_only(capsys):
    layer = tl.PrintShape(n_in=2, msg="here")
    f = jax.jit(lambda a, b: layer.pure_fn((a, b), (), (), None)[0])
    f(normal(2, 3), np.zeros(4, np.int32))
    f(normal(2, 3), np.zeros(4, np.int32))
    assert capsys.readouterr().out == "PrintShape here: [(2, 3) float32, (4,) int32]\n"


def test_one_hot_is_rows_of_the_identity():
    x = np.array([[0, 2], [1, 5]])
    y = tl.one_hot(x, 3)
    wanted = np.vstack([np.eye(3), np.zeros((3, 3))])[x]
    np.testing.assert_array_equal(y, wanted)
    assert tl.one_hot(x, 3, dtype=jnp.int32).dtype == jnp.int32


def test_log_softmax_function_is_the_layer():
    x = normal(2, 3)
    np.testing.assert_array_equal(tl.log_softmax(x, 0), tl.LogSoftmax(axis=0)(x))


# --- Probability --------------------------------------------------------------------


def test_log_gaussian_pdf_in_two_dimensions():
    x, mu = np.array([[0.5, 1.0], [2.0, -1.0]]), np.array([0.0, 1.0])
    sigma = np.array([[2.0, 0.5], [0.5, 1.0]])
    d = x - mu
    distance = np.einsum("bi,ij,bj->b", d, np.linalg.inv(sigma), d)
    wanted = -0.5 * (2 * np.log(2 * np.pi) + np.log(np.linalg.det(sigma)) + distance)
    np.testing.assert_allclose(tl.log_gaussian_pdf(x, mu, sigma), wanted, rtol=1e-5)


def test_log_gaussian_diag_pdf_is_the_full_one():
    x, mu = normal(4, 3), normal(4, 3, seed=1)
    variances = np.exp(normal(4, 3, seed=2))
    full = np.einsum("bi,ij->bij", variances, np.eye(3))
    np.testing.assert_allclose(
        tl.log_gaussian_diag_pdf(x, mu, variances),
        tl.log_gaussian_pdf(x, mu, full),
        rtol=1e-4,
        atol=1e-4,
    )


def test_multigaussian_loss_is_the_log_of_a_sum_of_densities():
    preds, targets = normal(5, 2 * (1 + 2 * 3)).astype(np.float64), normal(5, 3)
    share = np.exp(preds[:, :2]) / np.exp(preds[:, :2]).sum(1, keepdims=True)
    means, roots = preds[:, 2:8].reshape(5, 2, 3), preds[:, 8:].reshape(5, 2, 3)
    variances = roots**2 + 1e-6
    density = np.exp(-((targets[:, None] - means) ** 2) / (2 * variances))
    density /= np.sqrt(2 * np.pi * variances)
    with np.errstate(divide="ignore"):
        wanted = -np.log((share * density.prod(-1)).sum(-1))
    y = tl.multigaussian_loss(preds.astype(np.float32), targets, 2)
    seen = np.isfinite(wanted)
    assert seen.sum() >= 3
    np.testing.assert_allclose(y[seen], wanted[seen], rtol=1e-3)


def test_multigaussian_loss_refuses_wrong_sizes():
    with pytest.raises(ValueError, match="needs 14 predictions for 2 .* got 9"):
        tl.multigaussian_loss(normal(5, 9), normal(5, 3), 2)


def test_logsoftmax_sample_follows_the_probabilities():
    p = np.array([0.1, 0.6, 0.3])
    log_p = jnp.log(jnp.broadcast_to(p, (20_000, 3)))
    drawn = np.asarray(tl.logsoftmax_sample(log_p, rng=KEY))
    shares = np.bincount(drawn, minlength=3) / 20_000
    np.testing.assert_allclose(shares, p, atol=5 * 0.5 / np.sqrt(20_000))
    cold = np.asarray(tl.logsoftmax_sample(log_p, temperature=0.5, rng=KEY))
    shares = np.bincount(cold, minlength=3) / 20_000
    # Gumbel noise times T samples from p^(1/T).
    np.testing.assert_allclose(shares, p**2 / (p**2).sum(), atol=0.02)


def test_logsoftmax_sample_is_greedy_at_temperature_zero_and_wants_a_key_else():
    log_p = np.log(np.array([[0.2, 0.7, 0.1]]))
    assert tl.logsoftmax_sample(log_p, temperature=0.0).tolist() == [1]
    with pytest.raises(ValueError, match="needs a random key at temperature 1.0"):
        tl.logsoftmax_sample(log_p)


# --- What is printed ----------------------------------------------------------------


@pytest.mark.parametrize(
    "layer, text",
    [
        (tl.Dense(128), "Dense_128"),
        (tl.Dense(128, name="out"), "out"),
        (tl.Embedding(10, 4), "Embedding_10_4"),
        (tl.Dropout(), "Dropout"),
        (tl.Weights(tl.RandomNormalInitializer(), (2,)), "Weights_(2,)_in0"),
        (tl.RandomUniform(), "RandomUniform_in0"),
        (tl.LocallyConnected1d(5, 3), "LocallyConnected1d_5_3"),
        (tl.SummaryScalar("a"), "summary_a"),
        (tl.Flatten(2), "Flatten_keep2"),
        (tl.PrintShape(2), "PrintShape_2_in2_out2"),
        (tl.ShiftRight(), "ShiftRight(1)"),
        (tl.LogSoftmax(), "LogSoftmax"),
        (tl.Mean(), "Mean"),
        (tl.Serial(tl.Dense(2), tl.Negate()), "Serial[\n  Dense_2\n  Negate\n]"),
    ],
)
def test_layers_print_as_in_trax_but_flat(layer, text):
    assert str(layer) == text


def test_copies_have_weights_of_their_own():
    x = normal(3, 4)
    layer = make(tl.Dense(2), x)
    other = copy.deepcopy(layer)
    other.weights = jax.tree.map(jnp.zeros_like, other.weights)
    assert (np.asarray(other(x)) == 0).all() and (np.asarray(layer(x)) != 0).any()

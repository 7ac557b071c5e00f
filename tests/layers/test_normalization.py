"""Normalization layers against float64, and BatchNorm over several devices."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers.running import batch_context
from retrax.shapes import ShapeDtype, signature


def normal(*shape, seed=0, mean=0.0):
    x = np.random.default_rng(seed).normal(size=shape) + mean
    return x.astype(np.float32)


def run(layer, x, mask=None):
    """Initializes the layer and gives (outputs, state) of one call."""
    weights, state = layer.init(signature(x))
    with batch_context(None, mask):
        return layer.pure_fn(x, weights, state, None)


def standardized(x, axis, epsilon):
    x = x.astype(np.float64)
    mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon), mean, var


# --- LayerNorm ----------------------------------------------------------------------


def test_layer_norm_is_its_formula():
    x = normal(3, 4, 6)
    layer = tl.LayerNorm(epsilon=1e-3)
    scale, bias = normal(6, seed=1), normal(6, seed=2)
    y, _ = layer.pure_fn(x, (scale, bias), (), None)
    wanted = standardized(x, -1, 1e-3)[0] * scale + bias
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_layer_norm_starts_as_the_plain_normalization():
    weights, state = tl.LayerNorm().init(ShapeDtype((2, 5)))
    assert [w.tolist() for w in weights] == [[1.0] * 5, [0.0] * 5] and state == ()


def test_layer_norm_without_centering_divides_by_the_root_mean_square():
    x = normal(3, 6, mean=2.0)
    scale, bias = normal(6, seed=1), normal(6, seed=2)
    y, _ = tl.LayerNorm(center=False).pure_fn(x, (scale, bias), (), None)
    x64 = x.astype(np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mean", [1e3, -1e5])
def test_layer_norm_is_exact_far_from_zero(mean):
    x = normal(64, 512, mean=mean)
    y = jax.jit(lambda x: run(tl.LayerNorm(), x)[0])(x)
    np.testing.assert_allclose(y, standardized(x, -1, 1e-6)[0], rtol=0, atol=2e-6)


def test_layer_norm_is_exact_beside_an_outlier():
    x = normal(64, 512)
    x[:, 0] = 1e4
    wanted = standardized(x, -1, 1e-6)[0]
    np.testing.assert_allclose(run(tl.LayerNorm(), x)[0], wanted, rtol=1e-6, atol=1e-5)


def test_layer_norm_of_a_constant_vector_is_zero_with_finite_gradient():
    x = jnp.full((2, 8), 3.0)
    layer = tl.LayerNorm()
    weights, _ = layer.init(signature(x))
    assert (layer(x) == 0).all()
    grad = jax.grad(lambda x: layer.pure_fn(x, weights, (), None)[0][0, 0])(x)
    assert np.isfinite(grad).all()


def test_layer_norm_gradient_is_that_of_the_formula():
    x, g = normal(2, 7), normal(2, 7, seed=3)
    layer = tl.LayerNorm(epsilon=1e-2)
    weights, _ = layer.init(signature(x))
    grad = jax.grad(lambda x: (layer.pure_fn(x, weights, (), None)[0] * g).sum())(x)

    def loss(x):
        return (standardized(x, -1, 1e-2)[0] * g).sum()

    wanted = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[i] = 1e-5
        wanted[i] = (loss(x + step) - loss(x - step)) / 2e-5
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [tl.LayerNorm(), tl.LayerNorm(center=False)])
def test_half_precision_is_normalized_in_float32(layer):
    x = jnp.asarray(normal(4, 256, mean=20.0), jnp.bfloat16)
    y, _ = run(layer, x)
    assert y.dtype == jnp.bfloat16
    wanted = np.asarray(run(layer, x.astype(jnp.float32))[0])
    np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=2**-8, atol=1e-6)


def test_layer_norm_code_grows_with_depth_not_with_its_square():
    def lines(depth):
        block = [tl.Residual(tl.LayerNorm(), tl.Dense(4)) for _ in range(depth)]
        model = tl.Serial(block)
        x = jnp.ones((2, 4))
        weights, state = model.init(signature(x))

        def loss(w):
            return model.pure_fn(x, w, state, None)[0].sum()

        text = jax.jit(jax.grad(loss)).lower(weights).compile().as_text()
        return text.count("\n")

    assert lines(16) < 2.5 * lines(8)


def test_layer_norm_refuses_scalars():
    with pytest.raises(LayerError, match="got a scalar"):
        tl.LayerNorm().init(ShapeDtype(()))


# --- BatchNorm ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, axis", [((6, 5), 0), ((4, 3, 2, 5), (0, 1, 2)), ((4, 3, 5), (0, -1))]
)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_batch_norm_in_training_is_its_formula(shape, axis, center, scale):
    x = normal(*shape, mean=3.0)
    layer = tl.BatchNorm(axis, center=center, scale=scale, momentum=0.9)
    (bias, gain), state = layer.init(signature(x))
    wanted, mean, var = standardized(x, axis, 1e-5)
    axes = {a % x.ndim for a in np.atleast_1d(axis)}
    kept = tuple(d for i, d in enumerate(shape) if i not in axes)
    if scale:
        assert gain.shape == kept and (gain == 1).all()
        gain = normal(*kept, seed=1)
        wanted = wanted * gain.reshape(mean.shape)
    if center:
        assert bias.shape == kept and (bias == 0).all()
        bias = normal(*kept, seed=2)
        wanted = wanted + bias.reshape(mean.shape)
    y, new_state = layer.pure_fn(x, (bias, gain), state, None)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new_state[0], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(new_state[1], 0.9 + 0.1 * var, rtol=1e-5)
    assert new_state[2] == 1 and new_state[2].dtype == jnp.int32
    assert new_state[0].shape == state[0].shape == mean.shape


def test_batch_norm_outside_of_training_uses_the_averages():
    x = normal(6, 5)
    layer = tl.BatchNorm(0, mode="eval")
    weights, _ = layer.init(signature(x))
    mean, var = normal(1, 5, seed=1), np.exp(normal(1, 5, seed=2))
    state = (mean, var, jnp.int32(3))
    y, new_state = layer.pure_fn(x, weights, state, None)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5), rtol=1e-5)
    assert new_state is state


def test_batch_norm_averages_converge_to_the_moments():
    layer = tl.BatchNorm(0, momentum=0.5)
    x = normal(50, 3, mean=4.0)
    layer.init(signature(x))
    for _ in range(30):
        layer(x)
    mean, var, n_batches = layer.state
    np.testing.assert_allclose(mean[0], x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var[0], x.var(0), rtol=1e-5)
    assert n_batches == 30


def test_batch_norm_variance_survives_a_large_mean():
    x = normal(64, 5, mean=1e4)
    _, (_, var, _) = run(tl.BatchNorm(0, momentum=0.0), x)
    np.testing.assert_allclose(var[0], x.astype(np.float64).var(0), rtol=1e-4)


@pytest.mark.parametrize("axis", [(0,), (0, 1)])
def test_padded_rows_do_not_count(axis):
    x = normal(6, 4, 3, mean=2.0)
    padded = np.concatenate([x, np.full((2, 4, 3), np.nan, np.float32)])
    mask = jnp.array([1.0] * 6 + [0.0] * 2)
    layer = tl.BatchNorm(axis, momentum=0.9)
    layer.init(signature(x))
    y, state = run(layer, padded, mask)
    y_whole, state_whole = run(layer, x)
    np.testing.assert_allclose(y[:6], y_whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(state, state_whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_batch_of_padding_changes_nothing():
    x = normal(4, 3)
    layer = tl.BatchNorm(0)
    weights, state = layer.init(signature(x))
    with batch_context(None, jnp.zeros(4)):
        y, new_state = layer.pure_fn(x, weights, state, None)
    for a, b in zip(state, new_state, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("masked", [False, True])
def test_two_devices_are_one(masked):
    x, g = normal(8, 3, mean=1.0), normal(8, 3, seed=5)
    mask = jnp.array([1.0] * 5 + [0.0] * 3) if masked else jnp.ones(8)
    layer = tl.BatchNorm(0, momentum=0.9)
    weights, state = layer.init(ShapeDtype((8, 3)))

    def loss(weights, x, g, mask, axis):
        with batch_context(axis, mask if masked else None):
            y, new_state = layer.pure_fn(x, weights, state, None)
        return (y * g * mask[:, None]).sum(), (y, new_state)

    grad_fn = jax.grad(loss, has_aux=True)
    grads, (y, new_state) = grad_fn(weights, x, g, mask, None)

    def on_device(x, g, mask):
        grads, aux = grad_fn(weights, x, g, mask, "batch")
        return jax.lax.psum(grads, "batch"), aux

    halves = [a.reshape(2, 4, *a.shape[1:]) for a in (x, g, mask)]
    grads2, (y2, state2) = jax.vmap(on_device, axis_name="batch")(*halves)
    np.testing.assert_allclose(y2.reshape(8, 3), y, rtol=1e-5, atol=1e-6)
    for a, b in zip(state2, new_state, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-6)
        np.testing.assert_array_equal(a[0], a[1])
    for a, b in zip(grads2, grads, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-5)


def test_batch_norm_declares_how_devices_agree():
    assert tl.BatchNorm().state_sync == "mean"


def test_batch_norm_keeps_half_precision_and_float32_averages():
    y, state = run(tl.BatchNorm(0), jnp.ones((4, 3), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and state[0].dtype == jnp.float32


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: tl.BatchNorm(epsilon=-1.0), "epsilon must not be negative"),
        (lambda: tl.BatchNorm(momentum=1.5), r"\[0, 1\], got 1.5"),
        (lambda: tl.BatchNorm().init(ShapeDtype((4, 3))), "got 2 axes; pass axis=0"),
    ],
)
def test_batch_norm_refuses(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# --- FilterResponseNorm -------------------------------------------------------------


def test_filter_response_norm_is_its_formula():
    x = normal(2, 3, 4, 5)
    layer = tl.FilterResponseNorm(init_epsilon=1e-2)
    weights, _ = layer.init(signature(x))
    assert weights[2] == ()
    scale, bias = normal(5, seed=1), normal(5, seed=2)
    y, _ = layer.pure_fn(x, (scale, bias, ()), (), None)
    nu2 = (x.astype(np.float64) ** 2).mean((1, 2), keepdims=True)
    wanted = scale * x / np.sqrt(nu2 + 1e-2) + bias
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def test_filter_response_norm_learns_epsilon():
    x = normal(2, 3, 5)
    layer = tl.FilterResponseNorm(
        learn_epsilon=True, init_epsilon=1e-2, init_learnt_epsilon=0.5
    )
    weights, _ = layer.init(signature(x))
    (learnt,) = weights[2]
    assert learnt == 0.5
    y, _ = layer.pure_fn(x, (*weights[:2], (jnp.float32(-2.0),)), (), None)
    nu2 = (x.astype(np.float64) ** 2).mean(1, keepdims=True)
    np.testing.assert_allclose(y, x / np.sqrt(nu2 + 2.01), rtol=1e-5, atol=1e-6)


def test_filter_response_norm_refuses():
    with pytest.raises(ValueError, match="must be positive"):
        tl.FilterResponseNorm(init_epsilon=0.0)
    with pytest.raises(LayerError, match=r"got \(2, 3\)"):
        tl.FilterResponseNorm().init(ShapeDtype((2, 3)))


# --- Configuration ------------------------------------------------------------------


def test_gin_sets_momentum_but_never_the_mode():
    gin.clear_config()
    try:
        gin.parse_config("retrax.layers.BatchNorm.momentum = 0.0")
        _, state = run(tl.BatchNorm(0), normal(6, 3, mean=5.0))
        assert (state[0] > 3).all()
        with pytest.raises(ValueError, match="mode"):
            gin.parse_config("BatchNorm.mode = 'eval'")
    finally:
        gin.clear_config()

"""Activation functions against their formulas in float64."""

import math

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype

X = np.concatenate([np.linspace(-6, 6, 49), [-30.0, 30.0]]).astype(np.float32)


def erf(x):
    return np.vectorize(math.erf)(x)


def elu(x, a):
    return np.where(x > 0, x, a * np.expm1(np.minimum(x, 0)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CASES = {
    "Relu": (tl.Relu(), lambda x: np.maximum(x, 0)),
    "ParametricRelu": (tl.ParametricRelu(2.0), lambda x: np.maximum(2 * x, 0)),
    "LeakyRelu": (tl.LeakyRelu(0.2), lambda x: np.where(x > 0, x, 0.2 * x)),
    "LeakyRelu default": (tl.LeakyRelu(), lambda x: np.where(x > 0, x, 0.01 * x)),
    "Elu": (tl.Elu(0.5), lambda x: elu(x, 0.5)),
    "Selu": (tl.Selu(), lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772)),
    "Selu other": (tl.Selu(2.0, 3.0), lambda x: 3 * elu(x, 2.0)),
    "Gelu": (tl.Gelu(), lambda x: x * (1 + erf(x / np.sqrt(2))) / 2),
    "FastGelu": (
        tl.FastGelu(),
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    "Sigmoid": (tl.Sigmoid(), sigmoid),
    "Tanh": (tl.Tanh(), np.tanh),
    "HardSigmoid": (tl.HardSigmoid(), lambda x: np.maximum(0, np.minimum(1, 1 + x))),
    "HardTanh": (tl.HardTanh(), lambda x: np.maximum(-1, np.minimum(1, x))),
    "Softplus": (tl.Softplus(), lambda x: np.logaddexp(x, 0)),
    "Exp": (tl.Exp(), np.exp),
    "Swish": (tl.Swish(), lambda x: x * sigmoid(x)),
}


@pytest.mark.parametrize("name", CASES)
def test_activation_is_its_formula(name):
    layer, f = CASES[name]
    wanted = f(X.astype(np.float64))
    np.testing.assert_allclose(layer(X), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite_and_types_kept(name):
    layer, _ = CASES[name]

    def total(x):
        return layer.pure_fn(x, (), (), None)[0].sum()

    assert np.isfinite(jax.grad(total)(jnp.asarray(X))).all()
    assert layer(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_fast_gelu_is_near_gelu():
    np.testing.assert_allclose(tl.FastGelu()(X), tl.Gelu()(X), atol=5e-4)


def test_log_is_the_natural_logarithm():
    np.testing.assert_allclose(tl.Log()(np.exp(X)), X, rtol=1e-5, atol=1e-6)


def test_relu_gradient_at_zero_is_zero():
    grad = jax.grad(lambda x: tl.Relu().pure_fn(x, (), (), None)[0])
    assert grad(0.0) == 0.0


def test_glu_gates_the_first_half_by_the_second():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_allclose(tl.Glu()(x), x[:, :4] * sigmoid(x[:, 4:]), rtol=1e-5)
    with pytest.raises(LayerError, match=r"even size, got \(3, 7\)"):
        tl.Glu()(x[:, :7])


def test_thresholded_linear_unit_trains_its_threshold():
    layer = tl.ThresholdedLinearUnit()
    weights, _ = layer.init(ShapeDtype((3,)))
    assert weights.shape == () and weights == 0
    x = np.array([-2.0, 0.5, 3.0], np.float32)
    y, _ = layer.pure_fn(x, jnp.float32(1.0), (), None)
    assert y.tolist() == [1.0, 1.0, 3.0]
    grad = jax.grad(lambda t: layer.pure_fn(x, t, (), None)[0].sum())(jnp.float32(1.0))
    assert grad == 2.0


def test_layers_print_flat_under_their_names():
    for name, (layer, _) in CASES.items():
        assert str(layer) == name.split()[0]
        assert len(layer.sublayers) == 0


@pytest.mark.parametrize(
    "name", "Exp FastGelu Gelu HardSigmoid HardTanh Relu Sigmoid Softplus Tanh".split()
)
def test_gin_knows_the_functions_trax_configures(name):
    made = gin.get_configurable(f"retrax.layers.{name}")()
    assert str(made) == name

"""Activation functions as layers.

Above `base`. Formulas are those of `jax.nn` where it has them, else Trax's.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.base import Fn, Layer

__all__ = [
    "Elu",
    "Exp",
    "FastGelu",
    "Gelu",
    "Glu",
    "HardSigmoid",
    "HardTanh",
    "LeakyRelu",
    "Log",
    "ParametricRelu",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Swish",
    "Tanh",
    "ThresholdedLinearUnit",
]


@gin.configurable(module="retrax.layers")
def Relu() -> Layer:
    """Makes a layer that computes max(x, 0); its gradient at 0 is 0.

    Example:
      >>> Relu()(jnp.array([-1.0, 0.0, 2.0])).tolist()
      [0.0, 0.0, 2.0]
    """
    return Fn("Relu", lambda x: jax.nn.relu(x))


def ParametricRelu(a: float = 1.0) -> Layer:
    """Makes a layer that computes max(a x, 0), the slope a being fixed."""
    return Fn("ParametricRelu", lambda x: jnp.maximum(a * x, jnp.zeros_like(x)))


def LeakyRelu(a: float = 0.01) -> Layer:
    """Makes a layer that computes x for x >= 0 and a x below."""
    return Fn("LeakyRelu", lambda x: jax.nn.leaky_relu(x, a))


def Elu(a: float = 1.0) -> Layer:
    """Makes a layer that computes x for x > 0 and a (exp(x) - 1) below.

    Source: Clevert et al. 2016, https://arxiv.org/abs/1511.07289.
    """
    return Fn("Elu", lambda x: jax.nn.elu(x, a))


def Selu(
    alpha: float = 1.6732632423543772848170429916717,
    lmbda: float = 1.0507009873554804934193349852946,
) -> Layer:
    """Makes a layer that computes lmbda x for x > 0, lmbda alpha (exp(x) - 1) below.

    Source: Klambauer et al. 2017, https://arxiv.org/abs/1706.02515.
    """
    return Fn("Selu", lambda x: lmbda * jax.nn.elu(x, alpha))


@gin.configurable(module="retrax.layers")
def Gelu() -> Layer:
    """Makes a layer that computes x P(X <= x) for a standard normal X, exactly.

    Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
    """
    return Fn("Gelu", lambda x: jax.nn.gelu(x, approximate=False))


@gin.configurable(module="retrax.layers")
def FastGelu() -> Layer:
    """Makes a layer that computes the tanh approximation of `Gelu`.

    Within 5e-4 of it; the approximation is that of the same paper.
    """
    return Fn("FastGelu", lambda x: jax.nn.gelu(x, approximate=True))


@gin.configurable(module="retrax.layers")
def Sigmoid() -> Layer:
    """Makes a layer that computes 1 / (1 + exp(-x))."""
    return Fn("Sigmoid", lambda x: jax.nn.sigmoid(x))


@gin.configurable(module="retrax.layers")
def Tanh() -> Layer:
    """Makes a layer that computes the hyperbolic tangent."""
    return Fn("Tanh", lambda x: jnp.tanh(x))


@gin.configurable(module="retrax.layers")
def HardSigmoid() -> Layer:
    """Makes a layer that computes max(0, min(1, 1 + x)), as Trax does.

    `jax.nn.hard_sigmoid` is another function: relu6(x + 3) / 6.
    """
    return Fn("HardSigmoid", lambda x: jnp.clip(1 + x, 0, 1))


@gin.configurable(module="retrax.layers")
def HardTanh() -> Layer:
    """Makes a layer that computes max(-1, min(1, x))."""
    return Fn("HardTanh", lambda x: jnp.clip(x, -1, 1))


@gin.configurable(module="retrax.layers")
def Softplus() -> Layer:
    """Makes a layer that computes log(1 + exp(x)), safe for large x."""
    return Fn("Softplus", lambda x: jax.nn.softplus(x))


@gin.configurable(module="retrax.layers")
def Exp() -> Layer:
    """Makes a layer that computes exp(x)."""
    return Fn("Exp", lambda x: jnp.exp(x))


def Log() -> Layer:
    """Makes a layer that computes the natural logarithm."""
    return Fn("Log", lambda x: jnp.log(x))


def Swish() -> Layer:
    """Makes a layer that computes x sigmoid(x).

    Source: Ramachandran et al. 2017, https://arxiv.org/abs/1710.05941.
    """
    return Fn("Swish", lambda x: jax.nn.silu(x))


def Glu() -> Layer:
    """Makes a layer that computes a sigmoid(b) for a, b the halves of the last axis.

    Source: Dauphin et al. 2017, https://arxiv.org/abs/1612.08083. (Trax's raises.)
    """

    def glu(x: Any) -> Any:
        if x.shape[-1] % 2:
            raise ValueError(f"Glu needs a last axis of even size, got {x.shape}.")
        return jax.nn.glu(x)

    return Fn("Glu", glu)


@gin.configurable(module="retrax.layers")
class ThresholdedLinearUnit(Layer):
    """Computes max(x, t) with a trainable scalar t that starts at 0.

    Goes with `FilterResponseNorm`; source: Singh and Krishnan 2019,
    https://arxiv.org/abs/1911.09737, equation 3 (there one t for each channel).
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes t."""
        self.weights = jnp.zeros((), jnp.float32)

    def forward(self, x: Any) -> Any:
        """Computes max(x, t) in the type of x."""
        return jnp.maximum(x, self.weights.astype(x.dtype))

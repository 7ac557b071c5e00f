"""Layers without weights that are plain functions of arrays, and those functions.

Above `base`. Activation functions have a module of their own, `activation_fns`.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.base import Fn, Layer, PureLayer

__all__ = [
    "ArgMax",
    "Flatten",
    "LogSoftmax",
    "LogSumExp",
    "Max",
    "Mean",
    "Min",
    "Negate",
    "PrintShape",
    "ShiftRight",
    "Softmax",
    "StopGradient",
    "Sum",
    "ThresholdToBinary",
    "ToFloat",
    "log_softmax",
    "one_hot",
]


@gin.configurable(module="retrax.layers")
def LogSoftmax(axis: int = -1) -> Layer:
    """Makes a layer that turns logits into log-probabilities along an axis."""
    return Fn("LogSoftmax", lambda x: log_softmax(x, axis))


@gin.configurable(module="retrax.layers")
def Softmax(axis: int = -1) -> Layer:
    """Makes a layer that turns logits into probabilities along an axis."""
    return Fn("Softmax", lambda x: jax.nn.softmax(x, axis))


def LogSumExp(axis: int = -1) -> Layer:
    """Makes a layer that computes log(sum(exp(x))) along an axis, which is kept."""
    return Fn(
        "LogSumExp", lambda x: jax.scipy.special.logsumexp(x, axis=axis, keepdims=True)
    )


def Mean(axis: int | tuple[int, ...] | None = -1, keepdims: bool = False) -> Layer:
    """Makes a layer that computes the mean along an axis, or of all for None."""
    return Fn("Mean", lambda x: jnp.mean(x, axis=axis, keepdims=keepdims))


def Max(axis: int | tuple[int, ...] | None = -1, keepdims: bool = False) -> Layer:
    """Makes a layer that computes the maximum along an axis, or of all for None."""
    return Fn("Max", lambda x: jnp.max(x, axis=axis, keepdims=keepdims))


def Min(axis: int | tuple[int, ...] | None = -1, keepdims: bool = False) -> Layer:
    """Makes a layer that computes the minimum along an axis, or of all for None."""
    return Fn("Min", lambda x: jnp.min(x, axis=axis, keepdims=keepdims))


def Sum(axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Layer:
    """Makes a layer that computes the sum along an axis, or of all for None."""
    return Fn("Sum", lambda x: jnp.sum(x, axis=axis, keepdims=keepdims))


def ArgMax(axis: int = -1) -> Layer:
    """Makes a layer that finds the place of the maximum along an axis."""
    return Fn("ArgMax", lambda x: jnp.argmax(x, axis=axis))


def ThresholdToBinary(threshold: float = 0.5) -> Layer:
    """Makes a layer that gives int32 1 where x > threshold and 0 elsewhere."""
    return Fn("ThresholdToBinary", lambda x: (x > threshold).astype(jnp.int32))


def ToFloat() -> Layer:
    """Makes a layer that converts to float32."""
    return Fn("ToFloat", lambda x: x.astype(jnp.float32))


def Negate() -> Layer:
    """Makes a layer that changes the sign."""
    return Fn("Negate", lambda x: -x)


def StopGradient() -> Layer:
    """Makes an identity layer that lets no gradient through."""
    return Fn("StopGradient", lambda x: jax.lax.stop_gradient(x))


def Flatten(n_axes_to_keep: int = 1) -> Layer:
    """Makes a layer that joins all axes but the first n_axes_to_keep into one.

    Example:
      >>> Flatten()(jnp.zeros((2, 3, 4))).shape
      (2, 12)
    """

    def flatten(x: Any) -> Any:
        if x.ndim <= n_axes_to_keep:
            raise ValueError(
                f"Flatten({n_axes_to_keep}) needs inputs of more than "
                f"{n_axes_to_keep} axes, got shape {x.shape}."
            )
        return jnp.reshape(x, x.shape[:n_axes_to_keep] + (-1,))

    return Fn(f"Flatten_keep{n_axes_to_keep}", flatten)


def ShiftRight(n_positions: int = 1, mode: str = "train") -> Layer:
    """Makes a layer that moves axis 1 up by n_positions, zeros coming in at the start.

    x: (batch, length, ...). In mode 'predict' the layer is the identity: the decoding
    loop feeds the output before.
    """

    def shift(x: Any) -> Any:
        if mode == "predict":
            return x
        if x.ndim < 2:
            raise ValueError(
                f"ShiftRight needs inputs of shape (batch, length, ...), got {x.shape}."
            )
        widths = [(0, 0)] * x.ndim
        widths[1] = (n_positions, 0)
        return jnp.pad(x, widths)[:, : x.shape[1]]

    return Fn(f"ShiftRight({n_positions})", shift)


def PrintShape(n_in: int = 1, msg: str = "") -> Layer:
    """Makes an identity layer that prints its inputs' shapes whenever it is traced."""

    def show(xs: Any) -> Any:
        items = xs if isinstance(xs, (tuple, list)) else (xs,)
        shapes = ", ".join(f"{x.shape} {x.dtype}" for x in items)
        print(f"PrintShape {msg}: [{shapes}]" if msg else f"PrintShape: [{shapes}]")
        return xs

    return PureLayer(show, n_in=n_in, n_out=n_in, name=f"PrintShape_{n_in}")


# --- Functions of arrays ------------------------------------------------------------


def one_hot(x: Any, n_categories: int, dtype: Any = jnp.float32) -> Any:
    """Returns ones at the places of integers x along a new last axis, zeros elsewhere.

    Integers outside of [0, n_categories) give zeros only.

    Example:
      >>> one_hot(jnp.array([0, 2]), 3).tolist()
      [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return jax.nn.one_hot(x, n_categories, dtype=dtype)


def log_softmax(x: Any, axis: int = -1) -> Any:
    """Returns x - log(sum(exp(x))) along an axis, safe for large x."""
    return jax.nn.log_softmax(x, axis)

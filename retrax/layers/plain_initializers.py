"""Initializers whose scale is given, not found from fans.

Part of `initializers`, where they are called from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "AtariConvInit",
    "InitializerFromFile",
    "OrthogonalInitializer",
    "RandomNormalInitializer",
    "RandomUniformInitializer",
]

Initializer = Callable[..., jax.Array]


def RandomNormalInitializer(stddev: float = 1e-2) -> Initializer:
    """Returns an initializer of normal values of the given standard deviation."""

    def init(
        shape: Sequence[int], rng: Any, nonreceptive_dims: Any = None
    ) -> jax.Array:
        del nonreceptive_dims
        return stddev * jax.random.normal(rng, tuple(shape), jnp.float32)

    return init


def RandomUniformInitializer(lim: float = 1.0) -> Initializer:
    """Returns an initializer of values uniform between -lim and lim."""

    def init(
        shape: Sequence[int], rng: Any, nonreceptive_dims: Any = None
    ) -> jax.Array:
        del nonreceptive_dims
        return jax.random.uniform(rng, tuple(shape), jnp.float32, -lim, lim)

    return init


def OrthogonalInitializer(stddev: float = 1.0) -> Initializer:
    """Returns an initializer of orthogonal matrices times stddev.

    All axes but the last count as rows. The columns are orthonormal if there are no
    more of them than rows, else the rows are (Saxe et al. 2014,
    https://arxiv.org/abs/1312.6120).
    """

    def init(
        shape: Sequence[int], rng: Any, nonreceptive_dims: Any = None
    ) -> jax.Array:
        del nonreceptive_dims
        if len(shape) < 2:
            raise ValueError(
                "OrthogonalInitializer needs a shape of at least two axes, got "
                f"{tuple(shape)}."
            )
        n_columns = shape[-1]
        n_rows = math.prod(shape[:-1])
        tall = (max(n_rows, n_columns), min(n_rows, n_columns))
        q, r = jnp.linalg.qr(jax.random.normal(rng, tall, jnp.float32))
        # The signs make the distribution uniform over all orthogonal matrices.
        q = q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)
        return stddev * (q if n_rows >= n_columns else q.T).reshape(tuple(shape))

    return init


@gin.configurable(module="retrax.layers")
def AtariConvInit(
    kernel_shape: Sequence[int], rng: Any, dtype: Any = jnp.float32
) -> jax.Array:
    """Makes kernels uniform within +-1/sqrt(fan_in), for Atari networks.

    Args:
      kernel_shape: (height, width, d_in, d_out); fan_in is the product of the first
        three.
      rng: a random key.
      dtype: of the kernel.
    """
    if len(kernel_shape) != 4:
        raise ValueError(
            "AtariConvInit needs a kernel shape (height, width, d_in, d_out), got "
            f"{tuple(kernel_shape)}."
        )
    bound = 1.0 / math.sqrt(math.prod(kernel_shape[:3]))
    return jax.random.uniform(rng, tuple(kernel_shape), dtype, -bound, bound)


def InitializerFromFile(path: str) -> Initializer:
    """Returns an initializer that loads an array from a .npy file.

    The file is read when weights are made; pickled objects in it are refused.

    Raises:
      ValueError: (by the initializer) the file's array has another shape.
    """

    def init(
        shape: Sequence[int], rng: Any, nonreceptive_dims: Any = None
    ) -> jax.Array:
        del rng, nonreceptive_dims
        with open(path, "rb") as f:
            array = np.load(f, allow_pickle=False)
        if array.shape != tuple(shape):
            raise ValueError(
                f"{path} holds an array of shape {array.shape} but the layer needs "
                f"{tuple(shape)}."
            )
        return jnp.asarray(array)

    return init

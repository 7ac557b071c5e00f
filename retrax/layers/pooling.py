"""Pooling: one number for each window and channel.

Above `base`. Inputs are (batch, spatial axes..., channels), with as many spatial axes
as `pool_size` has sizes; further leading axes count as batch. As in Trax the window
moves by 1 where no strides are given (not by its own size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax.layers.base import Fn, Layer

__all__ = ["AvgPool", "MaxPool", "SumPool"]

Padding = str | Sequence[tuple[int, int]]


def MaxPool(
    pool_size: Sequence[int] = (2, 2),
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> Layer:
    """Makes a layer that gives the largest value of each window; padding never is.

    Args:
      pool_size: sizes of the window.
      strides: steps of the window; 1 by default.
      padding: 'VALID' (none), 'SAME', or a pair (before, after) for each spatial axis.

    Raises:
      ValueError: the sizes are not positive, or differ in number.

    Example:
      >>> pool = MaxPool((2, 2), strides=(2, 2))
      >>> pool(jnp.arange(16.).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
      [[5.0, 7.0], [13.0, 15.0]]
    """
    window = _Window("MaxPool", pool_size, strides, padding)

    def pool(x: Any) -> Any:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        lowest = -np.inf if is_float else jnp.iinfo(x.dtype).min
        return window.reduce(x, lowest, jax.lax.max)

    return Fn("MaxPool", pool)


def SumPool(
    pool_size: Sequence[int] = (2, 2),
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> Layer:
    """Makes a layer that gives the sum of each window; arguments as in `MaxPool`."""
    window = _Window("SumPool", pool_size, strides, padding)
    return Fn("SumPool", lambda x: window.reduce(x, 0, jax.lax.add))


def AvgPool(
    pool_size: Sequence[int] = (2, 2),
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> Layer:
    """Makes a layer that gives the mean of each window; arguments as in `MaxPool`.

    Padding does not count: windows over an edge have the mean of what they cover of
    the inputs. (So it is in Trax.)
    """
    window = _Window("AvgPool", pool_size, strides, padding)

    def pool(x: Any) -> Any:
        mean = window.reduce(x, 0, jax.lax.add) / window.counts(x.shape)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return mean.astype(x.dtype) if is_float else mean

    return Fn("AvgPool", pool)


# --- Helpers ------------------------------------------------------------------------


class _Window:
    """A window that moves over the axes before the last one."""

    def __init__(
        self,
        name: str,
        pool_size: Sequence[int],
        strides: Sequence[int] | None,
        padding: Padding,
    ) -> None:
        self._name = name
        self._sizes = tuple(pool_size)
        n = len(self._sizes)
        self._strides = (1,) * n if strides is None else tuple(strides)
        if len(self._strides) != n or min(self._sizes + self._strides, default=0) < 1:
            raise ValueError(
                f"{name} needs as many positive strides as sizes, got pool_size="
                f"{pool_size} and strides={strides}."
            )
        if not isinstance(padding, str):
            padding = tuple((before, after) for before, after in padding)
            fits = len(padding) == n and all(
                0 <= p < size
                for pads, size in zip(padding, self._sizes, strict=True)
                for p in pads
            )
        else:
            fits = padding in ("VALID", "SAME")
        if not fits:
            raise ValueError(
                f"{name} needs padding 'VALID', 'SAME' or a pair for each of the "
                f"{n} sizes {self._sizes}, smaller than the size; got {padding!r}."
            )
        self._padding = padding

    def reduce(self, x: Any, start: Any, f: Any) -> Any:
        """Joins each window's values by f, whose neutral value is `start`."""
        n_lead = self._n_lead(x.shape)
        dims = (*(1,) * n_lead, *self._sizes, 1)
        strides = (*(1,) * n_lead, *self._strides, 1)
        padding = self._padding
        if not isinstance(padding, str):
            padding = [*[(0, 0)] * n_lead, *padding, (0, 0)]
        # A constant: JAX knows the gradients only of reductions that it recognises.
        start = np.asarray(start, x.dtype)
        return jax.lax.reduce_window(x, start, f, dims, strides, padding)

    def counts(self, shape: Sequence[int]) -> Any:
        """Returns how many inputs each window covers: a number, or (spatial..., 1)."""
        if self._padding == "VALID":
            return math.prod(self._sizes)
        spatial = shape[self._n_lead(shape) : -1]
        ones = jnp.ones((1, *spatial, 1), jnp.float32)
        return self.reduce(ones, 0, jax.lax.add)[0]

    def _n_lead(self, shape: Sequence[int]) -> int:
        n = len(self._sizes)
        n_lead = len(shape) - n - 1
        if n_lead < 1:
            raise ValueError(
                f"{self._name} with pool_size={self._sizes} needs inputs (batch, {n} "
                f"spatial axes, channels), got the shape {tuple(shape)}."
            )
        for i, size in enumerate(self._sizes):
            pads = (0, 0) if isinstance(self._padding, str) else self._padding[i]
            if self._padding != "SAME" and shape[n_lead + i] + sum(pads) < size:
                raise ValueError(
                    f"{self._name}: a window of {size} does not fit into size "
                    f"{shape[n_lead + i]} with padding {pads}, axis {n_lead + i} of "
                    f"{tuple(shape)}; use padding='SAME' or a smaller window."
                )
        return n_lead

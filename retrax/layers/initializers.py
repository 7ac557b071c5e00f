"""Functions that make initial weights.

First of the layer modules, knowing neither layers nor runs. Each function here takes
settings and returns an initializer, called as `init(shape, rng)` or, by layers whose
kernels have more axes than two, `init(shape, rng, nonreceptive_dims)`. Those whose
scale does not depend on fans come from `plain_initializers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers.plain_initializers import (
    AtariConvInit,
    Initializer,
    InitializerFromFile,
    OrthogonalInitializer,
    RandomNormalInitializer,
    RandomUniformInitializer,
)

__all__ = [
    "AtariConvInit",
    "GlorotNormalInitializer",
    "GlorotUniformInitializer",
    "InitializerFromFile",
    "KaimingNormalInitializer",
    "KaimingUniformInitializer",
    "LeCunNormalInitializer",
    "LeCunUniformInitializer",
    "OrthogonalInitializer",
    "RandomNormalInitializer",
    "RandomUniformInitializer",
    "ScaledInitializer",
]


def ScaledInitializer(
    out_dim: int,
    in_dim: int,
    scale: float,
    mode: str,
    distribution: str,
    receptive_field: bool = True,
) -> Initializer:
    """Returns an initializer of variance scale / fan.

    fan_in = shape[in_dim] * r and fan_out = shape[out_dim] * r, where r is the product
    of the other sizes: the receptive field of a convolution kernel. Axes that a layer
    names as `nonreceptive_dims` (an int or several) are left out of r. (He et al. 2015,
    https://arxiv.org/abs/1502.01852, equation 10.) Trax takes r = 1 always, so its
    convolutions start with weights too large by sqrt(r): `receptive_field=False`
    gives its values. Matrices have r = 1 either way.

    Args:
      out_dim: axis of the output features.
      in_dim: axis of the input features.
      scale: factor of the variance.
      mode: 'fan_in', 'fan_out' or 'fan_avg' (the mean of both).
      distribution: 'normal', 'truncated_normal' (cut at two standard deviations and
        widened to keep the variance) or 'uniform'.
      receptive_field: False ignores r.

    Raises:
      ValueError: mode or distribution is unknown, or scale is not positive.

    Example:
      >>> init = ScaledInitializer(-1, -2, 1.0, 'fan_in', 'uniform')
      >>> init((300, 2), jax.random.key(0)).shape
      (300, 2)
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive for ScaledInitializer, got {scale}.")
    _check_choice("mode", mode, ("fan_in", "fan_out", "fan_avg"))
    _check_choice("distribution", distribution, tuple(_DRAW))

    def init(
        shape: Sequence[int], rng: Any, nonreceptive_dims: Any = None
    ) -> jax.Array:
        fan_in, fan_out = _fans(
            shape, out_dim, in_dim, receptive_field, nonreceptive_dims
        )
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
        variance = scale / max(fan[mode], 1)
        return _DRAW[distribution](rng, tuple(shape)) * math.sqrt(variance)

    return init


def GlorotNormalInitializer(
    out_dim: int = -1,
    in_dim: int = -2,
    scale: float = 1.0,
    receptive_field: bool = True,
) -> Initializer:
    """Returns a normal initializer of variance 2 * scale / (fan_in + fan_out).

    Source: Glorot and Bengio 2010, equation 16; fans as in `ScaledInitializer`.
    """
    return ScaledInitializer(
        out_dim, in_dim, scale, "fan_avg", "normal", receptive_field
    )


def GlorotUniformInitializer(
    out_dim: int = -1,
    in_dim: int = -2,
    scale: float = 1.0,
    receptive_field: bool = True,
) -> Initializer:
    """Returns a uniform initializer of variance 2 * scale / (fan_in + fan_out).

    Source: Glorot and Bengio 2010, equation 16; fans as in `ScaledInitializer`.
    """
    return ScaledInitializer(
        out_dim, in_dim, scale, "fan_avg", "uniform", receptive_field
    )


def LeCunNormalInitializer(
    out_dim: int = -1,
    in_dim: int = -2,
    scale: float = 1.0,
    receptive_field: bool = True,
) -> Initializer:
    """Returns a normal initializer of variance scale / fan_in.

    Source: LeCun et al. 1998, "Efficient BackProp", equation 16.
    """
    return ScaledInitializer(
        out_dim, in_dim, scale, "fan_in", "normal", receptive_field
    )


def LeCunUniformInitializer(
    out_dim: int = -1,
    in_dim: int = -2,
    scale: float = 1.0,
    receptive_field: bool = True,
) -> Initializer:
    """Returns a uniform initializer of variance scale / fan_in.

    Source: LeCun et al. 1998, "Efficient BackProp", equation 16.
    """
    return ScaledInitializer(
        out_dim, in_dim, scale, "fan_in", "uniform", receptive_field
    )


def KaimingNormalInitializer(
    out_dim: int = -1,
    in_dim: int = -2,
    param: float = 0.0,
    receptive_field: bool = True,
) -> Initializer:
    """Returns a normal initializer of variance gain / fan_in for (leaky) ReLUs.

    gain = 2 / sqrt(1 + param^2), where param is the slope on the negative side. He et
    al. 2015 (https://arxiv.org/abs/1502.01852, equation 14) have 2 / (1 + param^2);
    the square root is Trax's and is kept. For ReLU (param 0) they are the same.
    """
    scale = 2.0 / math.sqrt(1.0 + param**2)
    return ScaledInitializer(
        out_dim, in_dim, scale, "fan_in", "normal", receptive_field
    )


def KaimingUniformInitializer(
    out_dim: int = -1,
    in_dim: int = -2,
    param: float = 0.0,
    receptive_field: bool = True,
) -> Initializer:
    """Returns a uniform initializer with the variance of `KaimingNormalInitializer`."""
    scale = 2.0 / math.sqrt(1.0 + param**2)
    return ScaledInitializer(
        out_dim, in_dim, scale, "fan_in", "uniform", receptive_field
    )


# --- Helpers ------------------------------------------------------------------------


def _uniform(rng: Any, shape: tuple[int, ...]) -> jax.Array:
    limit = math.sqrt(3.0)
    return jax.random.uniform(rng, shape, jnp.float32, -limit, limit)


def _normal(rng: Any, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(rng, shape, jnp.float32)


def _truncated_normal(rng: Any, shape: tuple[int, ...]) -> jax.Array:
    # 0.8796... is the standard deviation of a normal variable cut at +-2.
    drawn = jax.random.truncated_normal(rng, -2.0, 2.0, shape, jnp.float32)
    return drawn / 0.87962566103423978


# Draw values of mean 0 and variance 1.
_DRAW = {
    "normal": _normal,
    "truncated_normal": _truncated_normal,
    "uniform": _uniform,
}


def _fans(
    shape: Sequence[int],
    out_dim: int,
    in_dim: int,
    receptive_field: bool,
    nonreceptive_dims: Any,
) -> tuple[float, float]:
    """Returns (fan_in, fan_out); with fewer than two axes the size is both."""
    if len(shape) < 2:
        size = math.prod(shape)
        return size, size
    axes = {out_dim % len(shape), in_dim % len(shape)}
    if len(axes) < 2:
        raise ValueError(
            f"out_dim={out_dim} and in_dim={in_dim} are the same axis of a weight of "
            f"shape {tuple(shape)}."
        )
    if nonreceptive_dims is None:
        nonreceptive_dims = ()
    elif isinstance(nonreceptive_dims, int):
        nonreceptive_dims = (nonreceptive_dims,)
    axes |= {d % len(shape) for d in nonreceptive_dims}
    others = math.prod(d for i, d in enumerate(shape) if i not in axes)
    r = others if receptive_field else 1
    return shape[in_dim] * r, shape[out_dim] * r


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{what} must be one of {choices}, got {value!r}.")

"""Transposed convolutions, which make their inputs larger.

Above `convolution`, whose options and checks they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax

from retrax.layers.convolution import Conv, Padding, Sizes

__all__ = ["ConvTranspose"]


@gin.configurable(module="retrax.layers")
class ConvTranspose(Conv):
    """Convolves its inputs spread out with strides - 1 zeros between them.

    x: (batch, height, width, d_in), y: (..., filters) of size x * stride + max(window -
    stride, 0) with 'VALID' padding and x * stride with 'SAME'. The kernel is not
    flipped, as in Trax and `jax.lax.conv_transpose`: item j adds to the output at
    i * stride + (window - 1) - j for the input at i ('VALID').
    Weights: as of `Conv`.

    Example:
      >>> import jax.numpy as jnp
      >>> from retrax.shapes import ShapeDtype
      >>> up = ConvTranspose(8, (4, 4), strides=2, padding='SAME')
      >>> _ = up.init(ShapeDtype((5, 7, 7, 3)))
      >>> up(jnp.ones((5, 7, 7, 3))).shape
      (5, 14, 14, 8)
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Sizes,
        strides: Sizes | None = None,
        padding: Padding = "VALID",
        rhs_dilation: Sizes | None = None,
        dimension_numbers: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_bias: bool = True,
        name: str | None = None,
    ) -> None:
        """Makes a transposed convolution; arguments as in `Conv`.

        A pair (before, after) of padding counts zeros around the spread inputs.

        Raises:
          ValueError: sizes are not positive or their number is not that of the axes.
        """
        super().__init__(
            filters,
            kernel_size,
            strides,
            padding,
            dimension_numbers,
            kernel_initializer,
            bias_initializer,
            use_bias,
            rhs_dilation,
            name=name,
        )

    def _convolve(self, x: Any, w: Any) -> Any:
        return jax.lax.conv_transpose(
            x,
            w,
            self._strides,
            self._padding,
            rhs_dilation=self._dilation,
            dimension_numbers=(self._lhs, self._rhs, self._out),
        )

    def _check_fit(self, shape: Sequence[int]) -> None:
        """Any size fits: the outputs are not smaller than the inputs."""

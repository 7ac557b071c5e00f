"""Convolutions over any number of axes.

Above `base` and `initializers`; under `causal_convolution`, `deconvolution` and
`rnn_cells`. Like all networks'
convolutions they do not flip the kernel. Letters of `dimension_numbers`: N batch, C
channels, I and O the kernel's inputs and outputs; any other is a spatial axis. Sizes,
strides and dilations go in the order of the kernel's spatial axes; an int stands for
the same along all of them.

Default initial weights are Glorot normal with the receptive field counted in the fans,
and with groups each one's own fans. Trax counts neither; its values come from
`kernel_initializer=GlorotNormalInitializer(receptive_field=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Layer

__all__ = ["Conv", "Conv1d", "DepthwiseConv", "NWC", "Padding", "Sizes"]

Sizes = int | Sequence[int]
Padding = str | Sequence[tuple[int, int]]

_NHWC = ("NHWC", "HWIO", "NHWC")
NWC = ("NWC", "WIO", "NWC")


class Conv(Layer):
    """Convolves its inputs with a trainable kernel.

    x: (batch, height, width, d_in), y: (batch, height', width', filters), or as
    dimension_numbers say; further leading axes count as batch where N comes first.
    Weights: (W, b), or the bare W without bias; W (height, width, d_in / groups,
    filters) in the order of the kernel's letters.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> conv = Conv(8, (3, 3), strides=(2, 2), padding='SAME')
      >>> _ = conv.init(ShapeDtype((5, 28, 28, 1)))
      >>> conv(jnp.ones((5, 28, 28, 1))).shape
      (5, 14, 14, 8)
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Sizes,
        strides: Sizes | None = None,
        padding: Padding = "VALID",
        dimension_numbers: tuple[str, str, str] = _NHWC,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_bias: bool = True,
        rhs_dilation: Sizes | None = None,
        groups: int = 1,
        name: str | None = None,
    ) -> None:
        """Makes a convolution.

        Args:
          filters: number of output channels.
          kernel_size: sizes of the window.
          strides: steps of the window; 1 by default.
          padding: 'VALID' (none), 'SAME' (zeros, so that y has size ceil(x / stride)),
            or a pair (before, after) for each spatial axis.
          dimension_numbers: the axes of inputs, kernel and outputs.
          kernel_initializer: makes W from (shape, rng); Glorot normal by default.
          bias_initializer: makes b; normal with deviation 1e-6 by default.
          use_bias: whether there is a b.
          rhs_dilation: distance of the kernel's items in the inputs; 1 by default.
          groups: number of equal parts of the channels that do not see each other.
          name: name of the layer.

        Raises:
          ValueError: sizes are not positive or their number is not that of the axes.
        """
        super().__init__(name=name)
        self._lhs, self._rhs, self._out = _checked_numbers(self.name, dimension_numbers)
        self._axes = [c for c in self._rhs if c not in "IO"]
        self._kernel_size = self._sizes("kernel_size", kernel_size)
        self._strides = self._sizes("strides", 1 if strides is None else strides)
        dilation = 1 if rhs_dilation is None else rhs_dilation
        self._dilation = self._sizes("rhs_dilation", dilation)
        self._padding = self._checked_padding(padding)
        if filters < 1 or groups < 1:
            raise ValueError(
                f"{self.name} needs filters and groups of at least 1, got {filters} "
                f"and {groups}."
            )
        self._filters = filters
        self._groups = groups
        self._kernel_initializer = kernel_initializer
        self._bias_initializer = bias_initializer or init.RandomNormalInitializer(1e-6)
        self._use_bias = use_bias

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (W, b), or the bare W without bias."""
        self._check_shape(input_signature.shape)
        d_in = self._axis_size(input_signature.shape, "C")
        filters, groups = self._filters_and_groups(d_in)
        if d_in % groups or filters % groups:
            raise ValueError(
                f"{self.name} with groups={groups} needs channels and filters that it "
                f"divides, got {d_in} channels and {filters} filters."
            )
        sizes = dict(zip(self._axes, self._kernel_size, strict=True))
        sizes.update(I=d_in // groups, O=filters)
        shape_w = tuple(sizes[c] for c in self._rhs)
        # As b is added to the outputs: the axes from C on, all of size 1 but that one.
        behind = self._out[self._out.index("C") + 1 :]
        rng_w, rng_b = jax.random.split(self.rng, 2)
        make_w = self._kernel_initializer or self._glorot(d_in, filters, groups)
        w = make_w(shape_w, rng_w)
        if self._use_bias:
            b = self._bias_initializer((filters, *(1 for _ in behind)), rng_b)
            self.weights = (w, b)
        else:
            self.weights = w

    def forward(self, x: Any) -> Any:
        """Computes the convolution, in the dtype that x and W promote to."""
        self._check_shape(x.shape)
        w, b = self.weights if self._use_bias else (self.weights, None)
        dtype = jnp.promote_types(x.dtype, w.dtype)
        x, w = x.astype(dtype), w.astype(dtype)
        n_extra = x.ndim - len(self._lhs)
        lead = x.shape[: n_extra + 1]
        if n_extra:
            x = jnp.reshape(x, (math.prod(lead), *x.shape[n_extra + 1 :]))
        y = self._convolve(x, w)
        y = y if b is None else y + b
        return jnp.reshape(y, (*lead, *y.shape[1:])) if n_extra else y

    def _filters_and_groups(self, d_in: int) -> tuple[int, int]:
        del d_in
        return self._filters, self._groups

    def _convolve(self, x: Any, w: Any) -> Any:
        d_in = self._axis_size(x.shape, "C")
        return jax.lax.conv_general_dilated(
            x,
            w,
            self._strides,
            self._padding,
            rhs_dilation=self._dilation,
            dimension_numbers=(self._lhs, self._rhs, self._out),
            feature_group_count=self._filters_and_groups(d_in)[1],
        )

    def _glorot(self, d_in: int, filters: int, groups: int) -> Callable[..., Any]:
        """Glorot normal with the fans of one group: each input meets filters / groups.

        The kernel's shape has only the inputs of one group but the outputs of all.
        """
        group_in = d_in // groups
        scale = (group_in + filters) / (group_in + filters // groups)
        out_dim, in_dim = self._rhs.index("O"), self._rhs.index("I")
        return init.GlorotNormalInitializer(out_dim, in_dim, scale=scale)

    def _axis_size(self, shape: Sequence[int], letter: str) -> int:
        return shape[self._lhs.index(letter) - len(self._lhs)]

    def _sizes(self, what: str, value: Sizes) -> tuple[int, ...]:
        n = len(self._axes)
        sizes = (value,) * n if isinstance(value, int) else tuple(value)
        if len(sizes) != n or any(size < 1 for size in sizes):
            raise ValueError(
                f"{self.name} needs a positive {what} for each of the {n} spatial axes "
                f"{self._axes} of its dimension_numbers, got {value}."
            )
        return sizes

    def _checked_padding(self, padding: Padding) -> Padding:
        if isinstance(padding, str):
            if padding in ("VALID", "SAME"):
                return padding
        elif len(padding) == len(self._axes) and all(len(p) == 2 for p in padding):
            return tuple((before, after) for before, after in padding)
        raise ValueError(
            "padding must be 'VALID', 'SAME' or a pair (before, after) for each of the "
            f"spatial axes {self._axes}, got {padding!r}."
        )

    def _check_shape(self, shape: Sequence[int]) -> None:
        n = len(self._lhs)
        takes_more = self._lhs[0] == "N" == self._out[0]
        if len(shape) < n or (len(shape) > n and not takes_more):
            raise ValueError(
                f"{self.name} needs inputs of {n} axes, {self._lhs}, got the shape "
                f"{tuple(shape)}; for other axes give dimension_numbers."
            )
        self._check_fit(shape)

    def _check_fit(self, shape: Sequence[int]) -> None:
        """Refuses inputs smaller than the window: outputs would be empty."""
        for i, letter in enumerate(self._axes):
            size = self._axis_size(shape, letter)
            window = (self._kernel_size[i] - 1) * self._dilation[i] + 1
            pads = (0, 0) if isinstance(self._padding, str) else self._padding[i]
            if self._padding != "SAME" and size + sum(pads) < window:
                raise ValueError(
                    f"{self.name}: a window of {window} does not fit into size {size} "
                    f"with padding {pads} along axis {letter} of the inputs "
                    f"{tuple(shape)}; use padding='SAME' or a smaller window."
                )


def Conv1d(
    filters: int,
    kernel_size: int,
    stride: int = 1,
    padding: Padding = "VALID",
    kernel_initializer: Callable[..., Any] | None = None,
    bias_initializer: Callable[..., Any] | None = None,
    use_bias: bool = True,
    rhs_dilation: int = 1,
    groups: int = 1,
    name: str | None = None,
) -> Layer:
    """Makes a `Conv` along one axis; x: (batch, length, d_in)."""
    return Conv(
        filters,
        kernel_size,
        stride,
        padding,
        NWC,
        kernel_initializer,
        bias_initializer,
        use_bias,
        rhs_dilation,
        groups,
        name,
    )


class DepthwiseConv(Conv):
    """Convolves each channel on its own, with `depth_multiplier` kernels each.

    x: (batch, height, width, d_in), y: (..., d_in * depth_multiplier), where channel c
    gives the outputs from c * depth_multiplier on. The arguments are those of `Conv`;
    groups is d_in.
    """

    def __init__(
        self,
        kernel_size: Sizes,
        depth_multiplier: int = 1,
        strides: Sizes | None = None,
        padding: Padding = "VALID",
        dimension_numbers: tuple[str, str, str] = _NHWC,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_bias: bool = True,
        rhs_dilation: Sizes | None = None,
        name: str | None = None,
    ) -> None:
        """Makes a convolution of single channels."""
        super().__init__(
            depth_multiplier,
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

    def _filters_and_groups(self, d_in: int) -> tuple[int, int]:
        return self._filters * d_in, d_in


# --- Helpers ------------------------------------------------------------------------


def _checked_numbers(
    name: str, dimension_numbers: tuple[str, str, str]
) -> tuple[str, str, str]:
    """Returns them, or says that their letters do not belong together."""
    lhs, rhs, out = dimension_numbers
    spatial = set(rhs) - set("IO")
    wanted = [spatial | set("NC"), spatial | set("IO"), spatial | set("NC")]
    got = [lhs, rhs, out]
    if any(
        set(g) != w or len(g) != len(w) for g, w in zip(got, wanted, strict=True)
    ) or spatial & set("NC"):
        raise ValueError(
            f"{name}: dimension_numbers {dimension_numbers} need the letters N, C, I "
            "and O once each and the same spatial letters, as ('NHWC', 'HWIO', 'NHWC')."
        )
    return lhs, rhs, out

"""Convolutions along time whose outputs see no later inputs.

Above `convolution`. Before the first input of a sequence are zeros. In mode 'predict'
the state is the last inputs, so that the next call goes on from them and a sequence
fed in parts gives what it gives as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Layer, State
from retrax.layers.convolution import NWC, Conv

__all__ = ["CausalConv", "CausalDepthwiseConv"]


class CausalConv(Conv):
    """Convolves along time; outputs see the inputs up to their own step.

    x: (batch, length, d_in), y: (batch, length, filters). W: (kernel_width, d_in,
    filters), whose last item belongs to the present step. Before the start are zeros.
    In mode 'predict' the state is the last inputs, so the next call goes on from them.
    """

    def __init__(
        self,
        filters: int,
        kernel_width: int = 3,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_bias: bool = True,
        rhs_dilation: int = 1,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes a causal convolution; arguments as in `Conv`, `mode` as in `Scan`."""
        super().__init__(
            filters,
            kernel_width,
            padding="VALID",
            dimension_numbers=NWC,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            use_bias=use_bias,
            rhs_dilation=rhs_dilation,
            name=name,
        )
        self._n_past = (kernel_width - 1) * rhs_dilation
        self._mode = mode

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the weights and, in mode 'predict', a past of zeros."""
        _check_sequence(self.name, input_signature.shape)
        super().init_weights_and_state(input_signature)
        self.state = _empty_past(input_signature, self._n_past, self._mode)

    def start_state(self, state: State) -> State:
        """Forgets the inputs of the calls before."""
        return jax.tree.map(jnp.zeros_like, state)

    def forward(self, x: Any) -> Any:
        """Convolves the inputs with their past before them."""
        _check_sequence(self.name, x.shape)
        extended, self.state = _with_past(x, self.state, self._n_past)
        return super().forward(extended)

    def _check_fit(self, shape: Sequence[int]) -> None:
        """Any length fits, with the past before it."""


class CausalDepthwiseConv(Layer):
    """Convolves each channel on its own along time; outputs see no later inputs.

    x: (batch, length, d), y: alike. W: (kernel_size, d), and W[i] belongs to the input
    i steps before; there is no bias. In mode 'predict' the state is the last inputs.
    """

    def __init__(
        self,
        kernel_size: int = 3,
        kernel_initializer: Callable[..., Any] | None = None,
        use_bfloat16: bool = False,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes a causal convolution of single channels.

        Args:
          kernel_size: number of steps that an output sees.
          kernel_initializer: makes W; by default uniform of variance 1 / kernel_size.
            Trax's is GlorotUniformInitializer(), too small by the number of channels.
          use_bfloat16: keeps W in bfloat16.
          mode: 'train', 'eval', or 'predict', which keeps the last inputs.
          name: name of the layer.

        Raises:
          ValueError: kernel_size is not positive.
        """
        super().__init__(name=name)
        if kernel_size < 1:
            raise ValueError(
                f"CausalDepthwiseConv needs kernel_size >= 1, got {kernel_size}."
            )
        self._kernel_size = kernel_size
        self._kernel_initializer = kernel_initializer or init.LeCunUniformInitializer()
        self._use_bfloat16 = use_bfloat16
        self._mode = mode

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes W and, in mode 'predict', a past of zeros."""
        _check_sequence(self.name, input_signature.shape)
        shape_w = (self._kernel_size, input_signature.shape[-1])
        w = self._kernel_initializer(shape_w, self.rng)
        self.weights = w.astype(jnp.bfloat16) if self._use_bfloat16 else w
        self.state = _empty_past(input_signature, self._kernel_size - 1, self._mode)

    def start_state(self, state: State) -> State:
        """Forgets the inputs of the calls before."""
        return jax.tree.map(jnp.zeros_like, state)

    def forward(self, x: Any) -> Any:
        """Sums up the weighted inputs of the last steps."""
        _check_sequence(self.name, x.shape)
        w, n_past, length = self.weights, self._kernel_size - 1, x.shape[1]
        x, self.state = _with_past(x, self.state, n_past)
        # A sum of products, which XLA fuses; its grouped convolution is slow on CPUs.
        shifted = (x[:, n_past - i :][:, :length] for i in range(n_past + 1))
        return sum(part * w[i] for i, part in enumerate(shifted))


# --- Helpers ------------------------------------------------------------------------


def _check_sequence(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 3:
        raise ValueError(
            f"{name} needs inputs (batch, length, d_in), got the shape {tuple(shape)}."
        )


def _empty_past(input_signature: Any, n_past: int, mode: str) -> State:
    """What `_with_past` starts from: () unless in mode 'predict'."""
    if mode != "predict":
        return ()
    batch, _, depth = input_signature.shape
    return jnp.zeros((batch, n_past, depth), input_signature.dtype)


def _with_past(x: Any, past: State, n_past: int) -> tuple[Any, State]:
    """Puts the past, or zeros, before the inputs; also returns the new past."""
    if isinstance(past, tuple):
        return jnp.pad(x, ((0, 0), (n_past, 0), (0, 0))), past
    if (past.shape[0], past.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"mode 'predict' was initialised for batches of {past.shape[0]} with "
            f"{past.shape[2]} channels, got {x.shape[0]} with {x.shape[2]}; call init "
            "for this batch size."
        )
    # In the dtype of now: what was initialised in float32 may run in bfloat16.
    extended = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    return extended, extended[:, x.shape[1] :].astype(past.dtype)

"""Cells: single steps of recurrent layers.

Above `combinators` and `convolution`; under `rnn`, which runs them over sequences. A
cell takes what a step sees and a state, and gives an output and the new state.

Dtypes: matrix products and outputs have the dtype that inputs and weights promote to;
a state keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.activation_fns import Sigmoid, Tanh
from retrax.layers.base import Fn, Layer
from retrax.layers.combinators import Branch, Serial
from retrax.layers.convolution import Conv, Sizes
from retrax.layers.core import Dropout
from retrax.layers.stack_layers import Gate, Multiply

__all__ = [
    "Cell",
    "ConvGRUCell",
    "GRUCell",
    "GeneralGRUCell",
    "InnerSRUCell",
    "LSTMCell",
    "check_mask",
    "check_n_units",
]


class Cell(Layer):
    """Base of cells: (x, [mask,] state) -> (h, new state).

    Subclasses write `_step`. The state's last n_units features are the last output.
    """

    def __init__(
        self,
        n_units: int,
        forget_bias: float,
        kernel_initializer: Callable[..., Any],
        bias_initializer: Callable[..., Any] | None,
        use_mask: bool,
        name: str | None,
    ) -> None:
        super().__init__(n_in=3 if use_mask else 2, n_out=2, name=name)
        check_n_units(type(self).__name__, n_units)
        self._n_units = n_units
        self._forget_bias = forget_bias
        self._kernel_initializer = kernel_initializer
        self._bias_initializer = bias_initializer or init.RandomNormalInitializer(1e-6)
        self._use_mask = use_mask

    def forward(self, inputs: Any) -> Any:
        """Makes one step."""
        x, state = inputs[0], inputs[-1]
        h, new_state = self._step(x, state)
        new_state = new_state.astype(state.dtype)
        if self._use_mask:
            check_mask(inputs[1], x)
            real = inputs[1].astype(bool)[..., None]
            last = state[..., -self._n_units :].astype(h.dtype)
            h = jnp.where(real, h, last)
            new_state = jnp.where(real, new_state, state)
        return h, new_state

    def _step(self, x: Any, state: Any) -> tuple[Any, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not define _step.")

    def _check_state(self, input_signature: Any, wanted: int, parts: str) -> int:
        """Returns the rows of a matrix for [x, h], or refuses the state's size."""
        x, state = input_signature[0], input_signature[-1]
        if not x.shape or not state.shape or state.shape[-1] != wanted:
            raise ValueError(
                f"{type(self).__name__} of {self._n_units} units needs inputs (..., "
                f"d_in) and a state (..., {wanted}), which is {parts}; got {x.shape} "
                f"and {state.shape}."
            )
        return x.shape[-1] + self._n_units


@gin.configurable(module="retrax.layers")
class LSTMCell(Cell):
    """Makes one step of an LSTM (Greff et al. 2015, https://arxiv.org/abs/1503.04069).

    x: (..., d_in), state: (..., 2 * n_units), which is [c, h]; gives (h', state').

        i, j, f, o = split([x, h] W + b, 4)
        c' = sigmoid(f) c + sigmoid(i) tanh(j)
        h' = sigmoid(o) tanh(c')

    Weights: W (d_in + n_units, 4 * n_units), b. There are no peepholes. As in Trax,
    `forget_bias` is added to all of b at the start, not to the part of f only.
    """

    def __init__(
        self,
        n_units: int,
        forget_bias: float = 1.0,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_mask: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a cell.

        Args:
          n_units: size of c and of h.
          forget_bias: added to the initial b.
          kernel_initializer: makes W; Glorot uniform by default.
          bias_initializer: makes b; normal with deviation 1e-6 by default.
          use_mask: takes (x, mask, state), the mask (...) false where nothing changes.
          name: name of the layer.

        Raises:
          ValueError: n_units is not positive.
        """
        kernel_initializer = kernel_initializer or init.GlorotUniformInitializer()
        super().__init__(
            n_units, forget_bias, kernel_initializer, bias_initializer, use_mask, name
        )

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (W, b)."""
        n = self._n_units
        n_rows = self._check_state(input_signature, 2 * n, "[c, h]")
        rng_w, rng_b = jax.random.split(self.rng, 2)
        w = self._kernel_initializer((n_rows, 4 * n), rng_w)
        self.weights = (w, self._bias_initializer((4 * n,), rng_b) + self._forget_bias)

    def _step(self, x: Any, state: Any) -> tuple[Any, Any]:
        c, h = jnp.split(state, 2, axis=-1)
        y = _dense(x, h, *self.weights)
        i, j, f, o = jnp.split(y, 4, axis=-1)
        c = c * jax.nn.sigmoid(f) + jax.nn.sigmoid(i) * jnp.tanh(j)
        h = jnp.tanh(c) * jax.nn.sigmoid(o)
        return h.astype(y.dtype), jnp.concatenate([c, h], axis=-1)


@gin.configurable(module="retrax.layers")
class GRUCell(Cell):
    """Makes one step of a gated recurrent unit.

    x: (..., d_in), h: (..., n_units); gives (h', h'). Cho et al. 2014,
    https://arxiv.org/abs/1406.1078, as in https://arxiv.org/abs/1412.3555:

        u, r = split(sigmoid([x, h] W1 + b1), 2)
        h' = u h + (1 - u) tanh([x, r h] W2 + b2)

    As in Trax, u keeps the old state, where the paper's z takes the new one. Weights:
    W1 (d_in + n_units, 2 * n_units), b1, W2 (d_in + n_units, n_units), b2.
    `forget_bias` is added to b1 at the start.
    """

    def __init__(
        self,
        n_units: int,
        forget_bias: float = 0.0,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_mask: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a cell; arguments as in `LSTMCell`, W uniform in +-0.01 by default.

        Raises:
          ValueError: n_units is not positive.
        """
        kernel_initializer = kernel_initializer or init.RandomUniformInitializer(0.01)
        super().__init__(
            n_units, forget_bias, kernel_initializer, bias_initializer, use_mask, name
        )

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (W1, b1, W2, b2)."""
        n = self._n_units
        n_rows = self._check_state(input_signature, n, "h")
        rngs = jax.random.split(self.rng, 4)
        w1 = self._kernel_initializer((n_rows, 2 * n), rngs[0])
        b1 = self._bias_initializer((2 * n,), rngs[1]) + self._forget_bias
        w2 = self._kernel_initializer((n_rows, n), rngs[2])
        self.weights = (w1, b1, w2, self._bias_initializer((n,), rngs[3]))

    def _step(self, x: Any, state: Any) -> tuple[Any, Any]:
        w1, b1, w2, b2 = self.weights
        y = _dense(x, state, w1, b1)
        u, r = jnp.split(jax.nn.sigmoid(y), 2, axis=-1)
        candidate = jnp.tanh(_dense(x, r * state, w2, b2))
        h = u * state + (1 - u) * candidate
        return h.astype(y.dtype), h


def GeneralGRUCell(
    candidate_transform: Callable[[], Layer],
    memory_transform_fn: Callable[[], Layer] | None = None,
    gate_nonlinearity: Callable[[], Layer] = Sigmoid,
    candidate_nonlinearity: Callable[[], Layer] = Tanh,
    dropout_rate_c: float = 0.1,
    sigmoid_bias: float = 0.5,
    mode: str = "train",
) -> Layer:
    """Makes a gated unit of a state alone, with any layers for its three maps.

    With U, R and C made by `candidate_transform` and the defaults, s -> s':

        u, r = sigmoid(U(s) + 0.5), sigmoid(R(s) + 0.5)
        s' = u s + (1 - u) dropout(tanh(C(r s)))

    Args:
      candidate_transform: makes a layer that keeps the shape; called three times.
      memory_transform_fn: makes a layer applied to the s that u keeps; None for the
        identity.
      gate_nonlinearity: makes the layer in the place of sigmoid.
      candidate_nonlinearity: makes the layer in the place of tanh.
      dropout_rate_c: chance of dropping an element of the candidate.
      sigmoid_bias: added before both gates, so that they start rather open.
      mode: dropout acts in 'train' only; in Trax, which has no mode here, it always
        does.
    """

    def gate() -> list[Layer]:
        biased = Fn(f"AddSigmoidBias({sigmoid_bias})", lambda x: x + sigmoid_bias)
        return [candidate_transform(), biased, gate_nonlinearity()]

    update = gate()
    candidate = [
        Branch(gate(), None),
        Multiply(),
        candidate_transform(),
        candidate_nonlinearity(),
        Dropout(rate=dropout_rate_c, mode=mode),
    ]
    memory = memory_transform_fn() if memory_transform_fn is not None else None
    return Serial(Branch(memory, update, candidate), Gate())


def ConvGRUCell(
    n_units: int, kernel_size: Sizes = (3, 3), mode: str = "train"
) -> Layer:
    """Makes a `GeneralGRUCell` of convolutions, for states with places.

    s: (batch, height, width, n_units). Ballas et al. 2015,
    https://arxiv.org/abs/1511.06432.
    """

    def conv() -> Layer:
        return Conv(filters=n_units, kernel_size=kernel_size, padding="SAME")

    return GeneralGRUCell(conv, mode=mode)


def InnerSRUCell() -> Layer:
    """Makes the step of an SRU: (a, f, c) -> (c', c') with c' = f c + a."""

    def step(a: Any, f: Any, c: Any) -> Any:
        new = f * c + a
        return new.astype(a.dtype), new.astype(c.dtype)

    return Fn("InnerSRUCell", step, n_out=2)


# --- Helpers ------------------------------------------------------------------------


def _dense(x: Any, h: Any, w: Any, b: Any) -> Any:
    """Computes [x, h] W + b in the dtype that x and W promote to."""
    dtype = jnp.promote_types(x.dtype, w.dtype)
    xh = jnp.concatenate([x.astype(dtype), h.astype(dtype)], axis=-1)
    return jnp.dot(xh, w) + b


def check_n_units(what: str, n_units: int) -> None:
    if n_units < 1:
        raise ValueError(f"{what} needs n_units of at least 1, got {n_units}.")


def check_mask(mask: Any, x: Any) -> None:
    if tuple(mask.shape) != tuple(x.shape[:-1]):
        raise ValueError(
            f"a mask of shape {tuple(mask.shape)} does not fit inputs of shape "
            f"{tuple(x.shape)}: it has one value for each step, (batch, length)."
        )

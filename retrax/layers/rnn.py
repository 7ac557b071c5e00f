"""Recurrent layers: LSTM, GRU and SRU over a sequence.

Above `combinators`, `scan` and `rnn_cells`, whose cells `Scan` runs along axis 1. The
number of units need not be the size of the inputs, as it must in Trax. States that
start here are float32 at least, so that sums over many steps keep small terms.

Padding: with `use_mask=True` a layer takes (x, mask) instead of x, the mask (batch,
length) bool or 0/1 numbers. Where it is false the state stays as it is and the output
is the last one again, so y[:, -1] is the output at the last real step whichever side
the padding is on (in `SRU` the output there means nothing). Only y comes out, which
lets `Bidirectional` join both directions; for a stack of layers put the mask there once
for each: `Serial(Select([0, 1, 1]), GRU(4, use_mask=True), GRU(4, use_mask=True))`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Fn, Layer
from retrax.layers.combinators import Branch, Parallel, Serial
from retrax.layers.core import Dense
from retrax.layers.rnn_cells import (
    Cell,
    GRUCell,
    InnerSRUCell,
    LSTMCell,
    check_mask,
    check_n_units,
)
from retrax.layers.scan import Scan
from retrax.layers.stack_layers import Select

__all__ = ["GRU", "LSTM", "MakeZeroState", "SRU", "ScanSRUCell"]


def LSTM(
    n_units: int,
    mode: str = "train",
    return_state: bool = False,
    initial_state: bool = False,
    use_mask: bool = False,
    name: str | None = None,
) -> Layer:
    """Makes an LSTM that runs along axis 1; formulas at `LSTMCell`.

    x: (batch, length, d_in) float, y: (batch, length, n_units), state: (batch,
    2 * n_units), which is [c, h].

    Args:
      n_units: size of outputs.
      mode: 'train', 'eval', or 'predict', which goes on from the state that the call
        before left.
      return_state: gives (y, last state) instead of y.
      initial_state: takes the first state from the stack, below the other inputs;
        else it is zero.
      use_mask: takes (x, mask); see the module's text.
      name: name of the layer.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> lstm = LSTM(7, return_state=True)
      >>> _ = lstm.init(ShapeDtype((2, 5, 3)))
      >>> y, state = lstm(jnp.ones((2, 5, 3)))
      >>> y.shape, state.shape
      ((2, 5, 7), (2, 14))
    """
    cell = LSTMCell(n_units, use_mask=use_mask)
    name = name or f"LSTM_{n_units}"
    return _over_time(cell, 2 * n_units, mode, return_state, initial_state, name)


def GRU(
    n_units: int,
    mode: str = "train",
    return_state: bool = False,
    initial_state: bool = False,
    use_mask: bool = False,
    name: str | None = None,
) -> Layer:
    """Makes a GRU that runs along axis 1; formulas at `GRUCell`.

    x: (batch, length, d_in) float, y: (batch, length, n_units), state: (batch,
    n_units). Arguments are those of `LSTM`.

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> both = tl.Bidirectional(tl.GRU(4))
      >>> _ = both.init(ShapeDtype((2, 5, 3)))
      >>> both(jnp.ones((2, 5, 3))).shape
      (2, 5, 8)
    """
    cell = GRUCell(n_units, use_mask=use_mask)
    name = name or f"GRU_{n_units}"
    return _over_time(cell, n_units, mode, return_state, initial_state, name)


def SRU(
    n_units: int,
    activation: Layer | None = None,
    mode: str = "train",
    use_mask: bool = False,
    name: str | None = None,
) -> Layer:
    """Makes a simple recurrent unit, whose matrix product is outside of the loop.

    x: (batch, length, d_in) float, y: (batch, length, n_units). Lei et al. 2018,
    https://arxiv.org/abs/1709.02755, with its scaled highway connection:

        r, f, u = sigmoid(x W_r + b_r), sigmoid(x W_f + b_f), x W_u + b_u
        c_t = f_t c_{t-1} + (1 - f_t) u_t
        y_t = r_t activation(c_t) + sqrt(3) (1 - r_t) x_t

    Where d_in is not n_units, the last x_t is projected by a matrix of its own (Trax
    fails there).

    Args:
      n_units: size of outputs.
      activation: layer applied to c; None for the identity.
      mode: as in `LSTM`.
      use_mask: takes (x, mask); see the module's text.
      name: name of the layer.
    """
    check_n_units("SRU", n_units)
    alpha = math.sqrt(3.0)

    def gates(rfu: Any, x: Any) -> Any:
        r, f, u = jnp.split(rfu, 3, axis=-1)
        r, f = jax.nn.sigmoid(r), jax.nn.sigmoid(f)
        return u * (1 - f), f, r, x

    def masked_gates(rfu: Any, x: Any, mask: Any) -> Any:
        check_mask(mask, x)
        added, f, r, x = gates(rfu, x)
        real = mask.astype(bool)[..., None]
        return jnp.where(real, added, 0), jnp.where(real, f, 1), r, x

    mask = [Select([1], n_in=2)] if use_mask else []
    return Serial(
        Branch(Dense(3 * n_units), _Highway(n_units), *mask),
        Fn("SRUGates", masked_gates if use_mask else gates, n_out=4),
        Parallel(None, None, Branch(MakeZeroState(), None)),  # Below f: c_0, then r.
        ScanSRUCell(mode),
        Select([0], n_in=2),
        activation,
        Fn("SRUOutput", lambda c, r, x: c * r + x * (1 - r) * alpha),
        name=name or f"SRU_{n_units}",
        sublayers_to_print=[],
    )


def MakeZeroState(depth_multiplier: int = 1, n_units: int | None = None) -> Layer:
    """Makes a layer that gives a state of zeros for inputs (batch, length, depth).

    Args:
      depth_multiplier: the state is (batch, depth_multiplier * n_units).
      n_units: None for the inputs' depth.
    """

    def zeros(x: Any) -> Any:
        if x.ndim != 3:
            raise ValueError(
                f"a recurrent layer needs inputs (batch, length, depth), got {x.shape}."
            )
        size = depth_multiplier * (x.shape[-1] if n_units is None else n_units)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.zeros((x.shape[0], size), dtype)

    return Fn("MakeZeroState", zeros)


def ScanSRUCell(mode: str = "train") -> Layer:
    """Makes an `InnerSRUCell` that runs along axis 1; `mode` as in `LSTM`."""
    return Scan(InnerSRUCell(), axis=1, mode=mode)


# --- Helpers ------------------------------------------------------------------------


class _Highway(Layer):
    """Passes x (..., d_in) on if d_in is n_units, else projects it to that."""

    def __init__(self, n_units: int) -> None:
        super().__init__()
        self._n_units = n_units

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the matrix where one is needed."""
        d_in = input_signature.shape[-1]
        if d_in != self._n_units:
            initializer = init.GlorotUniformInitializer()
            self.weights = initializer((d_in, self._n_units), self.rng)

    def forward(self, x: Any) -> Any:
        """Computes x or x W."""
        return x if isinstance(self.weights, tuple) else jnp.dot(x, self.weights)


def _over_time(
    cell: Cell,
    d_state: int,
    mode: str,
    return_state: bool,
    initial_state: bool,
    name: str,
) -> Layer:
    """Runs a cell along axis 1, from zeros or from a state on the stack."""
    n_inputs = cell.n_in - 1
    zeros = MakeZeroState(n_units=d_state)
    return Serial(
        None if initial_state else Branch(Select(range(n_inputs)), zeros),
        Scan(cell, axis=1, mode=mode),
        None if return_state else Select([0], n_in=2),
        name=name,
        sublayers_to_print=[],
    )

"""What Reformers need to go on after earlier tokens: mode 'predict'.

Beside `reformer_blocks`, under `reformer` and `reformer_encdec`. Each layer here has
the weights of a Serial, which is what models have in its place in other modes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from retrax import layers as tl
from retrax.layers.stack import remember_output
from retrax.shapes import ShapeDtype

__all__ = ["GroupByGroup", "SourceThenTarget"]


class _OfSerial(tl.Layer):
    """Has the sublayers and weights of a Serial; the state has own state at its end."""

    has_own_state = True

    def __init__(self, inner: tl.Serial, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self._inner, self._sublayers = inner, inner.sublayers

    def start_state(self, state: Any) -> Any:
        """Begins a sequence."""
        return jax.tree.map(jnp.zeros_like, state)

    def _run(self, x: Any, state: Any) -> tuple[Any, Any]:
        return self._inner.pure_fn(x, self.weights, state, None, use_cache=True)


class GroupByGroup(_OfSerial):
    """Runs a Serial once for n vectors: at each n-th one, on the last n.

    x: (batch, length, d) float, the vectors after those of the calls before; y: (batch,
    length, e). The inner layers take (batch, 1, n * d) and give (batch, 1, n * e), the
    n vectors that come out from then on. State: (last vectors (batch, n, d), those that
    come out (batch, n, e), number of vectors so far).
    """

    def __init__(self, inner: tl.Serial, n: int) -> None:
        """Makes the layer for groups of n vectors."""
        super().__init__(inner, 1, 1)
        self._n = n

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the Serial for one group."""
        (batch, length, d), dtype = input_signature.shape, input_signature.dtype
        group = ShapeDtype((batch, 1, self._n * d), dtype)
        self.weights, state = self._inner.init(group, use_cache=True)
        out = self._inner.output_signature(group)
        e = out.shape[-1] // self._n
        last = jnp.zeros((batch, self._n, d), dtype)
        parts = jnp.zeros((batch, self._n, e), out.dtype)
        self.state = (*state, (last, parts, jnp.zeros((), jnp.int32)))
        remember_output(
            self, input_signature, ShapeDtype((batch, length, e), out.dtype)
        )

    def forward(self, x: Any) -> Any:
        """Goes through the vectors one by one."""

        def one_more(carry: Any, x: Any) -> tuple[Any, Any]:
            state, (last, parts, t) = carry
            last = jnp.concatenate([last[:, 1:], x[:, None]], axis=1)

            def run() -> Any:
                group = jnp.reshape(last, (last.shape[0], 1, -1))
                y, new = self._run(group, state)
                return jnp.reshape(y, parts.shape).astype(parts.dtype), new

            begins = t % self._n == 0
            parts, state = jax.lax.cond(begins, run, lambda: (parts, state))
            return (state, (last, parts, t + 1)), parts[:, t % self._n]

        *inner, own = self.state
        carry = (tuple(inner), own)
        (inner, own), ys = jax.lax.scan(one_more, carry, jnp.swapaxes(x, 0, 1))
        self.state = (*inner, own)
        return jnp.swapaxes(ys, 0, 1)


class SourceThenTarget(_OfSerial):
    """Runs a Serial over a row's source first and then over its target.

    Takes (target (batch, length, d), source (batch, source length, d), flags (batch,
    source length) bool, whose true ones come first in each row), gives (y (batch,
    length, d), flags). The source counts in the first call. The inner layers keep what
    they have seen, a row for itself, since sources end at different places: their state
    has a first axis of rows. State: whether the source has been seen, int32.
    """

    def __init__(self, inner: tl.Serial) -> None:
        """Makes the layer."""
        super().__init__(inner, 3, 2)

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the Serial for one row, and its state for each of them."""
        target, _, flags = input_signature
        one = ShapeDtype((1, 1, target.shape[-1]), target.dtype)
        self.weights, state = self._inner.init(one, use_cache=True)
        n_rows = target.shape[0]
        state = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * n_rows), state)
        self.state = (*state, jnp.zeros((), jnp.int32))
        remember_output(self, input_signature, (target, flags))

    def forward(self, inputs: Any) -> Any:
        """Goes through source and target vector by vector."""
        target, source, flags = inputs
        *state, seen = self.state

        def of_row(state: Any, target: Any, source: Any, flags: Any) -> Any:
            def feed(state: Any, x: Any) -> tuple[Any, Any]:
                x, is_real = x
                y, new = self._run(x[None, None], state)
                state = jax.tree.map(
                    lambda a, b: jnp.where(is_real, a, b.astype(a.dtype)), new, state
                )
                return state, y[0, 0]

            state = jax.lax.cond(
                seen == 0,
                lambda: jax.lax.scan(feed, state, (source, flags))[0],
                lambda: state,
            )
            real = jnp.ones(target.shape[0], bool)
            return jax.lax.scan(feed, state, (target, real))

        state, y = jax.vmap(of_row)(tuple(state), target, source, flags)
        self.state = (*state, jnp.ones_like(seen))
        return y, flags

"""Attention between given queries, keys and values: no projections yet.

Above `attention_heads` and `attention_kernel`; under `attention`, which adds
projections. In mode 'predict' causal attention keeps earlier keys and values.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers import tree
from retrax.layers.attention_heads import AttentionCore
from retrax.layers.attention_kernel import attention_weights_of, dot_product_attention
from retrax.layers.base import Layer, State
from retrax.layers.rotary import RotaryPositions
from retrax.layers.sequences import refuse_overrun

__all__ = [
    "DotProductAttention",
    "DotProductCausalAttention",
    "PureAttention",
    "attention_weights",
]


class PureAttention(AttentionCore):
    """Attends from queries to keys and values with several heads.

    Takes (q, k, v, mask), gives (y, mask). q: (batch, q_length, n_heads * d_head)
    float; k, v: (batch, k_length, n_kv_heads * d_head) float; mask: anything that
    broadcasts to (batch, n_heads, q_length, k_length), bool or 0/1, true where a key
    is seen; y: (batch, q_length, n_heads * d_head). A query that sees no key gives 0.

    All modes but 'train' (dropout) and 'viz' (see `attention_weights`) are alike: no
    cache is kept, as keys after the query may be seen.
    """

    def __init__(
        self,
        n_heads: int = 1,
        dropout: float = 0.0,
        mode: str = "train",
        n_kv_heads: int | None = None,
        rotary: bool | RotaryPositions = False,
        position_bias: Layer | None = None,
        chunk: int | None = None,
        name: str | None = None,
    ) -> None:
        """Makes attention; see `AttentionQKV` for the arguments."""
        super().__init__(
            4,
            2,
            n_heads,
            dropout,
            mode,
            n_kv_heads,
            rotary,
            position_bias,
            chunk,
            name,
        )

    def forward(self, inputs: Any) -> Any:
        """Computes (y, mask)."""
        q, k, v, mask = inputs
        q, k, v = self._split_all(q, k, v, 0)
        return self._attend(q, k, v, mask), mask


@gin.configurable(module="retrax.layers", denylist=["mode"])
class DotProductCausalAttention(AttentionCore):
    """Attends from each position to itself and those before it.

    Takes (q, k, v), gives y, shapes as for `PureAttention`, all of one length. With
    n_heads 1, as in Trax, heads may be merged into the batch axis by `SplitIntoHeads`.

    In mode 'predict' the state is (k, v, index): keys and values so far, (batch,
    max_inference_length, n_kv_heads, d_head), and how many there are, int32. Each call
    takes the next tokens, any number of them, and gives what other modes give at those
    positions; rotary positions and biases go on counting. `model.reset_state()` begins
    a new sequence. A call that goes past max_inference_length is a ValueError; compiled
    code cannot raise and gives NaN then, and `check_state` tells why afterwards.
    """

    _causal = True

    def __init__(
        self,
        dropout: float = 0.0,
        max_inference_length: int = 2048,
        mode: str = "train",
        n_heads: int = 1,
        n_kv_heads: int | None = None,
        rotary: bool | RotaryPositions = False,
        position_bias: Layer | None = None,
        chunk: int | None = None,
        name: str | None = None,
    ) -> None:
        """Makes causal attention; see `CausalAttention` for the arguments."""
        super().__init__(
            3,
            1,
            n_heads,
            dropout,
            mode,
            n_kv_heads,
            rotary,
            position_bias,
            chunk,
            name,
        )
        if max_inference_length < 1:
            raise ValueError(
                f"max_inference_length must be at least 1, got {max_inference_length}."
            )
        self._cache_length = max_inference_length

    def check_own_state(self, state: State) -> None:
        """Raises ValueError if the cache was overrun."""
        if self._caches:
            refuse_overrun(self, state[2], self._cache_length, "max_inference_length")

    def own_limit(self) -> int | None:
        """Returns the length of the cache."""
        return self._cache_length if self._caches else None

    def forward(self, inputs: Any) -> Any:
        """Attends, in mode 'predict' also to the positions of earlier calls."""
        q, k, v = inputs
        if not self._caches:
            return self._attend(*self._split_all(q, k, v, 0))
        old_k, old_v, index = self._own()
        if q.shape[0] != old_k.shape[0]:
            raise ValueError(
                f"{self.name} got a batch of {q.shape[0]} in mode 'predict', but its "
                f"cache was made for {old_k.shape[0]}; call model.init with a "
                f"signature of batch size {q.shape[0]}, and load the weights again."
            )
        end = index + jnp.asarray(q.shape[1], index.dtype)
        refuse_overrun(self, end, self._cache_length, "max_inference_length")
        refuse_overrun(self, q.shape[1], self._cache_length, "max_inference_length")
        q, k, v = self._split_all(q, k, v, index)
        at = (0, index, 0, 0)
        k = jax.lax.dynamic_update_slice(old_k, k.astype(old_k.dtype), at)
        v = jax.lax.dynamic_update_slice(old_v, v.astype(old_v.dtype), at)
        y = self._attend(q, k, v, start=index)
        self._keep((k, v, end))
        # Past the end the update was clamped and has overwritten what was there.
        return jnp.where(end <= self._cache_length, y, jnp.nan)

    def _empty_cache(self, k: Any, v: Any) -> State:
        n, length = self._n_kv_heads, self._cache_length
        k_shape = self._head_shape(k, n, "keys")
        v_shape = self._head_shape(v, n, "values")
        return (
            jnp.zeros((k_shape[0], length, *k_shape[2:]), k.dtype),
            jnp.zeros((v_shape[0], length, *v_shape[2:]), v.dtype),
            jnp.zeros((), jnp.int32),
        )


class DotProductAttention(Layer):
    """Attends with heads that are split already, and shows the weights.

    Takes (q, k, v, mask), gives (y, weights). q: (batch, n_heads, q_length, d_head)
    float, k and v alike, y like q; weights: (batch, n_heads, q_length, k_length), those
    before dropout. Without the axis of heads everywhere if they were merged into the
    batch (`SplitIntoHeads`).
    """

    def __init__(
        self, dropout: float = 0.0, mode: str = "train", name: str | None = None
    ) -> None:
        """Makes attention that drops weights with chance `dropout` in mode 'train'."""
        super().__init__(n_in=4, n_out=2, name=name)
        self._dropout = dropout
        self._mode = mode

    def forward(self, inputs: Any) -> Any:
        """Computes (y, weights)."""
        q, k, v, mask = inputs
        axis = 1 if q.ndim == 4 else 2
        q, k, v = (
            jnp.swapaxes(x, 1, 2) if q.ndim == 4 else x[:, :, None] for x in (q, k, v)
        )
        if axis == 2 and jnp.ndim(mask) == 3:
            mask = mask[:, None]
        weights = attention_weights_of(q, k, mask)
        dropout = self._dropout if self._mode == "train" else 0.0
        y = dot_product_attention(
            q, k, v, mask, dropout=dropout, rng=self.rng if dropout else None
        )
        if axis == 1:
            return jnp.swapaxes(y, 1, 2), weights
        return y[:, :, 0], weights[:, 0]


def attention_weights(model: Layer) -> dict[str, Any]:
    """Returns what attention layers in mode 'viz' looked at in the last call.

    Returns:
      {path: weights}, weights (batch, n_heads, q_length, k_length); in a `Repeat` with
      a first axis of blocks. The model must have been called as `model(x)`.

    Example:
      >>> from retrax import layers as tl
      >>> m = tl.CausalAttention(4, n_heads=2, mode='viz')
      >>> x = jnp.ones((1, 3, 4))
      >>> _ = m.init(x)
      >>> y = m(x)
      >>> {path: w.shape for path, w in tl.attention_weights(m).items()}
      {'1.DotProductCausalAttention': (1, 2, 3, 3)}
    """
    return {
        path.removesuffix("own/").rstrip("/"): own
        for path, layer, own, _ in tree.walk(model, model.state)
        if isinstance(layer, AttentionCore) and layer.shows_weights
    }

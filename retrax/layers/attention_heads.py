"""The base of attention layers: heads, positions, dropout, weights on view.

Above `attention_kernel` and `rotary`; under `attention_cores`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers.attention_kernel import attention_weights_of, dot_product_attention
from retrax.layers.base import EMPTY_STATE, Layer, State
from retrax.layers.rotary import RotaryPositions
from retrax.shapes import ShapeDtype

__all__ = ["AttentionCore", "check_heads"]


class AttentionCore(Layer):
    """What attention cores share: heads, positions, dropout, weights on view.

    The optional sublayer is the position bias. The state of the core itself is the
    attention weights in mode 'viz', a cache in mode 'predict' if causal, else ().
    """

    _causal = False
    _cache_length = 0

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_heads: int,
        dropout: float,
        mode: str,
        n_kv_heads: int | None,
        rotary: bool | RotaryPositions,
        position_bias: Layer | None,
        chunk: int | None,
        name: str | None,
    ) -> None:
        super().__init__(n_in, n_out, name)
        self._n_heads = n_heads
        self._n_kv_heads = check_heads(self.name, n_heads, n_kv_heads)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"{self.name}: dropout must be in [0, 1), got {dropout}.")
        self._dropout = dropout
        self._mode = mode
        self._rotary = RotaryPositions() if rotary is True else rotary or None
        self._chunk = chunk
        self._sublayers = [] if position_bias is None else [position_bias]

    @property
    def has_own_state(self) -> bool:  # pyright: ignore
        """Whether there is state beside that of the position bias."""
        return bool(self._sublayers)

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the position bias, and the state that the mode asks for."""
        q, k, v = input_signature[:3]
        own: State = EMPTY_STATE
        if self.shows_weights:
            shape = (q.shape[0], self._n_heads, q.shape[1], k.shape[1])
            own = jnp.zeros(shape, jnp.promote_types(q.dtype, jnp.float32))
        elif self._caches:
            own = self._empty_cache(k, v)
        if not self._sublayers:
            self.state = own
            return
        n_keys = self._cache_length if self._caches else k.shape[1]
        sig = tuple(ShapeDtype((n,), "int32") for n in (q.shape[1], n_keys))
        weights, state = self._sublayers[0].init(sig, use_cache=True)
        self.weights, self.state = (weights,), (state, own)

    def start_state(self, state: State) -> State:
        """Empties the cache."""
        return jax.tree.map(jnp.zeros_like, state) if self._caches else state

    @property
    def shows_weights(self) -> bool:
        """Whether the own state is the attention weights of the last call."""
        return self._mode == "viz"

    @property
    def _caches(self) -> bool:
        return self._causal and self._mode == "predict"

    def _own(self) -> State:
        return self.state[-1] if self._sublayers else self.state

    def _keep(self, own: State) -> None:
        self.state = (*self.state[:-1], own) if self._sublayers else own

    def _bias_fn(self) -> Any:
        if not self._sublayers:
            return None
        layer, weights, state = self._sublayers[0], self.weights[0], self.state[0]
        return lambda q, k: layer.pure_fn((q, k), weights, state, None)[0]

    def _head_shape(self, x: Any, n: int, what: str) -> tuple[int, ...]:
        """(batch, length, n, d) for x of shape (batch, length, n * d)."""
        shape = tuple(x.shape)
        if len(shape) != 3:
            raise ValueError(
                f"{self.name}: {what} must have shape (batch, length, d_feature), got "
                f"{shape}."
            )
        if shape[-1] % n:
            heads = "n_heads" if what == "queries" else "n_kv_heads"
            raise ValueError(
                f"{self.name}: the d_feature of {what}, {shape[-1]}, is not divisible "
                f"by {heads}={n}."
            )
        return (*shape[:2], n, shape[-1] // n)

    def _split_all(self, q: Any, k: Any, v: Any, start: Any) -> tuple[Any, Any, Any]:
        """Splits heads, and turns queries and keys if they are to be turned."""
        n_kv = self._n_kv_heads
        q = jnp.reshape(q, self._head_shape(q, self._n_heads, "queries"))
        k = jnp.reshape(k, self._head_shape(k, n_kv, "keys"))
        v = jnp.reshape(v, self._head_shape(v, n_kv, "values"))
        if self._rotary is not None:
            q = self._rotary.turn(q, start + jnp.arange(q.shape[1]))
            k = self._rotary.turn(k, start + jnp.arange(k.shape[1]))
        return q, k, v

    def _attend(self, q: Any, k: Any, v: Any, mask: Any = None, start: Any = 0) -> Any:
        """Runs the kernel on split heads and joins them again."""
        dropout = self._dropout if self._mode == "train" else 0.0
        if dropout and self.rng is None:
            raise ValueError(
                f"{self.name} needs a random key in mode 'train' (dropout {dropout}), "
                "got rng=None; pass rng=jax.random.key(seed), or build the model with "
                "mode='eval'."
            )
        places: dict[str, Any] = dict(
            causal=self._causal, start=start, bias_fn=self._bias_fn()
        )
        if self.shows_weights:
            self._keep(attention_weights_of(q, k, mask, **places))
        y = dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout=dropout,
            rng=self.rng if dropout else None,
            chunk=self._chunk,
            **places,
        )
        return jnp.reshape(y, (*y.shape[:2], -1))

    def _empty_cache(self, k: Any, v: Any) -> State:
        raise NotImplementedError


def check_heads(name: str, n_heads: int, n_kv_heads: int | None) -> int:
    """Returns the number of key heads; ValueError if the two do not go together."""
    n_kv = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads < 1 or n_kv < 1 or n_heads % n_kv:
        raise ValueError(
            f"{name}: n_heads={n_heads} must be a positive multiple of "
            f"n_kv_heads={n_kv}."
        )
    return n_kv

"""The base of attention layers that hold their projections, and of those that cache.

Above `base`; under `efficient_attention`. Unlike the layers of `attention` these take
one flag for each position as a mask, as Trax's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers import initializers as init
from retrax.layers.base import Layer, State
from retrax.layers.sequences import refuse_overrun

__all__ = ["CachingAttention", "EfficientAttention"]


class EfficientAttention(Layer):
    """Base of attention layers that hold their projections: heads, masks, dropout.

    Weights: one (d_model, n_heads * d) matrix for each name of `_projections`, the last
    one (n_heads * d_v, d_model), each followed by its bias if there are biases.
    """

    _causal = False
    _projections = ("q", "k", "v")

    def __init__(
        self,
        n_in: int,
        n_heads: int,
        d_qk: int,
        d_v: int,
        masked: bool,
        bias: bool,
        mode: str,
        attention_dropout: float,
        output_dropout: float,
        n_parallel_heads: int | None,
        name: str | None,
    ) -> None:
        super().__init__(n_in + masked, 1, name)
        for what, n in (("n_heads", n_heads), ("d_qk", d_qk), ("d_v", d_v)):
            if n < 1:
                raise ValueError(f"{self.name}: {what} must be at least 1, got {n}.")
        if n_parallel_heads is not None and n_parallel_heads < 1:
            raise ValueError(
                f"{self.name}: n_parallel_heads must be at least 1 (or None for all), "
                f"got {n_parallel_heads}."
            )
        for what, rate in (
            ("attention_dropout", attention_dropout),
            ("output_dropout", output_dropout),
        ):
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{self.name}: {what} must be in [0, 1), got {rate}.")
        self._n_heads, self._d_qk, self._d_v = n_heads, d_qk, d_v
        self._masked, self._bias, self._mode = masked, bias, mode
        train = mode == "train"
        self._attention_dropout = attention_dropout if train else 0.0
        self._output_dropout = output_dropout if train else 0.0
        self._n_parallel_heads = n_parallel_heads

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the projections, and the cache of mode 'predict' if causal."""
        items = input_signature if self.n_in > 1 else (input_signature,)
        self._check(items)
        x, source = items[0], self._source(items)
        keys = jax.random.split(self.rng, 8)
        heads = {"q": self._d_qk, "k": self._d_qk, "v": self._d_v}
        weights: list[Any] = []
        for name, key in zip(self._projections, keys, strict=False):
            d_in = x.shape[-1] if name == "q" else source.shape[-1]
            weights += self._projection((d_in, self._n_heads * heads[name]), key)
        weights += self._projection((self._n_heads * self._d_v, x.shape[-1]), keys[-1])
        self.weights = tuple(weights)
        if self._caches:
            self.state = self._empty_cache(x.shape[0], x.dtype)

    def forward(self, inputs: Any) -> Any:
        """Attends."""
        items = inputs if self.n_in > 1 else (inputs,)
        self._check(items)
        x, source = items[0], self._source(items)
        seen = items[-1] != 0 if self._masked else jnp.ones(source.shape[:2], bool)
        heads = [
            self._heads(x if name == "q" else source, i)
            for i, name in enumerate(self._projections)
        ]
        y = self._go_on(*heads) if self._caches else self._attend(*heads, seen)
        y = self._projected(jnp.reshape(y, (*y.shape[:2], -1)), -1)
        if self._output_dropout:
            key = jax.random.fold_in(self._key("dropout"), 0)
            keep = jax.random.bernoulli(key, 1.0 - self._output_dropout, y.shape)
            y = jnp.where(keep, y / (1.0 - self._output_dropout), 0)
        return y

    def start_state(self, state: State) -> State:
        """Empties the cache."""
        return jax.tree.map(jnp.zeros_like, state) if self._caches else state

    @property
    def _caches(self) -> bool:
        return self._causal and self._mode == "predict"

    def _source(self, items: Any) -> Any:
        """What keys and values are made of."""
        return items[0]

    def _attend(self, *heads_and_seen: Any) -> Any:
        """(batch, length, n_heads, d) of each, seen (batch, length) -> (..., d_v)."""
        raise NotImplementedError

    def _go_on(self, *heads: Any) -> Any:
        """As `_attend`, with the points of earlier calls."""
        raise NotImplementedError

    def _empty_cache(self, n_rows: int, dtype: Any) -> State:
        raise NotImplementedError

    def _key(self, why: str) -> Any:
        if self.rng is None:
            raise ValueError(
                f"{self.name} needs a random key in mode 'train' ({why}), got "
                "rng=None; pass rng=jax.random.key(seed), or build the model with "
                "mode='eval'."
            )
        return self.rng

    def _projection(self, shape: tuple[int, int], key: Any) -> list[Any]:
        matrix = init.GlorotUniformInitializer()(shape, key)
        return [matrix, jnp.zeros(shape[1:])] if self._bias else [matrix]

    def _projected(self, x: Any, i: int) -> Any:
        if not self._bias:
            return jnp.dot(x, self.weights[i])
        n = len(self.weights) // 2
        return jnp.dot(x, self.weights[2 * (i % n)]) + self.weights[2 * (i % n) + 1]

    def _heads(self, x: Any, i: int) -> Any:
        y = self._projected(x, i)
        return jnp.reshape(y, (*y.shape[:2], self._n_heads, -1))

    def _check(self, items: Any) -> None:
        n_vectors = self.n_in - self._masked
        for x in items[:n_vectors]:
            if len(x.shape) != 3:
                raise ValueError(
                    f"{self.name} needs vectors (batch, length, d), got {x.shape}."
                )
        if self._masked and items[-1].shape != self._source(items).shape[:2]:
            raise ValueError(
                f"{self.name} needs one flag for each position as its mask: (batch, "
                f"length) = {self._source(items).shape[:2]}, got {items[-1].shape}."
            )

    def _for_each_head(self, f: Callable[..., Any], heads: Any, seen: Any) -> Any:
        """Runs f(*heads, seen, key), each of one head of one example, for all."""
        b, _, n = heads[0].shape[:3]
        flat = [_merged(x) for x in heads]
        each_seen = jnp.repeat(seen, n, axis=0)
        keys = None
        if self._attention_dropout:
            keys = jax.random.split(self._key("dropout"), b * n)

        def one(xs: Any) -> Any:
            return f(*xs)

        xs = (*flat, each_seen, keys)
        if self._n_parallel_heads is None or self._n_parallel_heads >= b * n:
            y = jax.vmap(one)(xs)
        else:
            # Without the checkpoint the loop would keep the scores of all heads.
            y = jax.lax.map(
                jax.checkpoint(one, prevent_cse=False),
                xs,
                batch_size=self._n_parallel_heads,
            )
        return jnp.moveaxis(jnp.reshape(y, (b, n, *y.shape[1:])), 1, 2)


class CachingAttention(EfficientAttention):
    """Self-attention that keeps `_cached` of each position in mode 'predict'."""

    def __init__(self, predict_mem_len: int, causal: bool, *args: Any) -> None:
        super().__init__(1, *args)
        self._causal = causal
        self._cache_length = predict_mem_len
        if predict_mem_len < 1:
            raise ValueError(
                f"{self.name}: predict_mem_len must be at least 1 position, got "
                f"{predict_mem_len}."
            )
        if self._mode == "predict" and (self._masked or not causal):
            raise ValueError(
                f"{self.name}: mode 'predict' needs causal=True and masked=False, got "
                f"causal={causal} and masked={self._masked}: a position is computed "
                "once, when no later one is known. Use mode='eval'."
            )

    def check_own_state(self, state: State) -> None:
        """Raises ValueError if the cache was overrun."""
        if self._caches:
            refuse_overrun(self, state[-1], self._cache_length, "predict_mem_len")

    def own_limit(self) -> int | None:
        """Returns the length of the cache."""
        return self._cache_length if self._caches else None

    def _append(self, *new: Any) -> tuple[list[Any], Any]:
        """Puts values (batch, length, ...) at the end of the cache.

        Returns all values kept, and the position of the first new one.
        """
        *old, index = self.state
        if old[0].shape[0] != new[0].shape[0]:
            raise ValueError(
                f"{self.name} got a batch of {new[0].shape[0]} in mode 'predict', but "
                f"its cache was made for {old[0].shape[0]}; call model.init with a "
                f"signature of batch size {new[0].shape[0]}, and load the weights "
                "again."
            )
        n = new[0].shape[1]
        end = index + jnp.asarray(n, index.dtype)
        refuse_overrun(self, end, self._cache_length, "predict_mem_len")
        refuse_overrun(self, n, self._cache_length, "predict_mem_len")
        kept = [
            jax.lax.dynamic_update_slice(
                a, x.astype(a.dtype), (0, index, *(0,) * (a.ndim - 2))
            )
            for a, x in zip(old, new, strict=True)
        ]
        self.state = (*kept, end)
        return kept, index

    def _nan_past_end(self, y: Any) -> Any:
        """Compiled code cannot raise; see `check_state`."""
        return jnp.where(self.state[-1] <= self._cache_length, y, jnp.nan)


# --- Helpers ------------------------------------------------------------------------


def _merged(x: Any) -> Any:
    """(batch, length, heads, d) -> (batch * heads, length, d)."""
    x = jnp.moveaxis(x, 2, 1)
    return jnp.reshape(x, (-1, *x.shape[2:]))

"""Multi-head attention with its projections, for encoders, decoders and between them.

Above `attention_cores`, `combinators`, `control` and `core`.
"""

from __future__ import annotations

from typing import Any

import gin
import jax.numpy as jnp

from retrax.layers.attention_cores import DotProductCausalAttention, PureAttention
from retrax.layers.attention_heads import check_heads
from retrax.layers.base import Fn, Layer
from retrax.layers.combinators import Branch, Parallel, Serial
from retrax.layers.control import Cache
from retrax.layers.core import Dense
from retrax.layers.rotary import RotaryPositions
from retrax.layers.stack_layers import Select

__all__ = [
    "Attention",
    "AttentionQKV",
    "CausalAttention",
    "ConfigurableAttention",
    "MergeHeads",
    "SplitIntoHeads",
]


@gin.configurable(module="retrax.layers", denylist=["mode"])
def Attention(
    d_feature: int,
    n_heads: int = 1,
    dropout: float = 0.0,
    mode: str = "train",
    n_kv_heads: int | None = None,
    use_bias: bool = True,
    rotary: bool | RotaryPositions = False,
    position_bias: Layer | None = None,
    chunk: int | None = None,
) -> Layer:
    """Makes self-attention under a mask: (x, mask) -> (y, mask).

    x, y: (batch, length, d_feature) float; mask as for `AttentionQKV`, which see for
    the arguments.

    Example:
      >>> layer = Attention(4, n_heads=2)
      >>> x, mask = jnp.ones((1, 3, 4)), jnp.ones((1, 1, 1, 3), bool)
      >>> _ = layer.init((x, mask))
      >>> layer((x, mask))[0].shape
      (1, 3, 4)
    """
    return Serial(
        Select([0, 0, 0]),
        AttentionQKV(
            d_feature,
            n_heads,
            dropout,
            mode,
            n_kv_heads=n_kv_heads,
            use_bias=use_bias,
            rotary=rotary,
            position_bias=position_bias,
            chunk=chunk,
        ),
    )


def AttentionQKV(
    d_feature: int,
    n_heads: int = 1,
    dropout: float = 0.0,
    mode: str = "train",
    cache_KV_in_predict: bool = False,
    q_sparsity: str | None = None,
    result_sparsity: str | None = None,
    n_kv_heads: int | None = None,
    use_bias: bool = True,
    rotary: bool | RotaryPositions = False,
    position_bias: Layer | None = None,
    chunk: int | None = None,
) -> Layer:
    """Makes attention between two sequences: (q, k, v, mask) -> (y, mask).

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2.2.
    q: (batch, q_length, d) float; k, v: (batch, k_length, d) float; mask: broadcasts
    to (batch, n_heads, q_length, k_length), bool or 0/1, true where a key is seen (see
    `PaddingMask`, `EncoderDecoderMask`); y: (batch, q_length, d_feature). Where a query
    sees no key, attention is 0 (and y the bias of the last projection).

    Args:
      d_feature: width of all projections.
      n_heads: number of heads; divides d_feature.
      dropout: chance of an attention weight to be dropped in mode 'train'.
      mode: 'train', 'eval', 'predict' or 'viz', which keeps the attention weights for
        `attention_weights`.
      cache_KV_in_predict: projects keys and values in the first call of mode 'predict'
        only, for decoders that look at one fixed encoder output.
      q_sparsity: 'noop' leaves out the projection of queries; nothing else is known.
      result_sparsity: 'noop' leaves out the last projection; nothing else is known.
      n_kv_heads: number of heads of keys and values, which then are
        n_kv_heads / n_heads as wide; None for n_heads.
      use_bias: whether the projections add a bias.
      rotary: turns queries and keys by their positions; True or `RotaryPositions`.
      position_bias: layer that makes a bias of positions: `RelativePositionBias`,
        `AlibiBias`. One instance in several layers is one set of weights.
      chunk: number of queries handled at a time, to save memory; None for all.

    Raises:
      ValueError: the heads do not fit.
    """
    _check_sparsity(q_sparsity=q_sparsity, result_sparsity=result_sparsity)
    d_kv = _d_kv("AttentionQKV", d_feature, n_heads, n_kv_heads)
    core = PureAttention(
        n_heads, dropout, mode, n_kv_heads, rotary, position_bias, chunk
    )

    def key_or_value() -> Layer:
        layer = Dense(d_kv, use_bias=use_bias)
        return Cache(layer, mode=mode) if cache_KV_in_predict else layer

    q_layer = None if q_sparsity == "noop" else Dense(d_feature, use_bias=use_bias)
    last = None if result_sparsity == "noop" else Dense(d_feature, use_bias=use_bias)
    return Serial(Parallel(q_layer, key_or_value(), key_or_value()), core, last)


@gin.configurable(module="retrax.layers", denylist=["mode"])
def CausalAttention(
    d_feature: int,
    n_heads: int = 1,
    dropout: float = 0.0,
    max_inference_length: int = 2048,
    use_dconv: bool = False,
    mode: str = "train",
    n_kv_heads: int | None = None,
    use_bias: bool = True,
    rotary: bool | RotaryPositions = False,
    position_bias: Layer | None = None,
    chunk: int | None = None,
) -> Layer:
    """Makes self-attention to the positions up to one's own: x -> y.

    x, y: (batch, length, d_feature) float. In mode 'predict' each call takes the tokens
    that follow those of the calls before, see `DotProductCausalAttention`. Arguments
    that are not named here are those of `AttentionQKV`.

    Args:
      d_feature: width of all projections.
      n_heads: number of heads; divides d_feature.
      dropout: chance of an attention weight to be dropped in mode 'train'.
      max_inference_length: longest sequence of mode 'predict'.
      use_dconv: not supported; use `ConfigurableAttention` with convolutions.
      mode: 'train', 'eval', 'predict' or 'viz'.

    Raises:
      ValueError: the heads do not fit, or use_dconv is set.

    Example:
      >>> layer = CausalAttention(8, n_heads=4, n_kv_heads=2, rotary=True)
      >>> x = jnp.ones((1, 3, 8))
      >>> _ = layer.init(x)
      >>> layer(x).shape
      (1, 3, 8)
    """
    if use_dconv:
        raise ValueError(
            "CausalAttention(use_dconv=True) is not supported; use "
            "ConfigurableAttention with layers [Dense(d), CausalDepthwiseConv(3)] for "
            "queries, keys and values."
        )
    d_kv = _d_kv("CausalAttention", d_feature, n_heads, n_kv_heads)
    core = DotProductCausalAttention(
        dropout,
        max_inference_length,
        mode,
        n_heads,
        n_kv_heads,
        rotary,
        position_bias,
        chunk,
    )
    qkv = [Dense(d, use_bias=use_bias) for d in (d_feature, d_kv, d_kv)]
    return Serial(Branch(*qkv), core, Dense(d_feature, use_bias=use_bias))


def ConfigurableAttention(
    q_layer: Any,
    k_layer: Any,
    v_layer: Any,
    final_layer: Any,
    qkv_attention_layer: Layer,
    n_heads: int = 1,
) -> Layer:
    """Makes self-attention of given parts: x -> y.

    Args:
      q_layer: layer (or list of layers) that makes queries (batch, length, d) of x.
      k_layer: makes keys.
      v_layer: makes values.
      final_layer: takes the joined heads.
      qkv_attention_layer: takes (q, k, v), each with its heads merged into the batch
        axis, (batch * n_heads, length, d / n_heads), as `DotProductCausalAttention()`.
      n_heads: number of heads.
    """
    return Serial(
        Branch(
            [q_layer, SplitIntoHeads(n_heads)],
            [k_layer, SplitIntoHeads(n_heads)],
            [v_layer, SplitIntoHeads(n_heads)],
        ),
        qkv_attention_layer,
        MergeHeads(n_heads),
        final_layer,
    )


def SplitIntoHeads(n_heads: int, merged_batch_and_head: bool = True) -> Layer:
    """Makes a layer that splits features into heads.

    x: (batch, length, n_heads * d); y: (batch * n_heads, length, d), or (batch,
    n_heads, length, d) if merged_batch_and_head is False.
    """

    def split(x: Any) -> Any:
        b, length, d = x.shape
        if d % n_heads:
            raise ValueError(
                f"SplitIntoHeads: d_feature {d} is not divisible by n_heads={n_heads}."
            )
        y = jnp.swapaxes(jnp.reshape(x, (b, length, n_heads, d // n_heads)), 1, 2)
        if merged_batch_and_head:
            return jnp.reshape(y, (b * n_heads, length, d // n_heads))
        return y

    return Fn("SplitIntoHeads", split)


def MergeHeads(n_heads: int, merged_batch_and_head: bool = True) -> Layer:
    """Makes a layer that undoes `SplitIntoHeads` with the same arguments."""

    def merge(x: Any) -> Any:
        if merged_batch_and_head:
            if x.shape[0] % n_heads:
                raise ValueError(
                    f"MergeHeads: the first axis, {x.shape[0]}, is not divisible by "
                    f"n_heads={n_heads}."
                )
            x = jnp.reshape(x, (x.shape[0] // n_heads, n_heads, *x.shape[1:]))
        b, _, length, d = x.shape
        return jnp.reshape(jnp.swapaxes(x, 1, 2), (b, length, n_heads * d))

    return Fn("MergeHeads", merge)


# --- Helpers ------------------------------------------------------------------------


def _d_kv(name: str, d_feature: int, n_heads: int, n_kv_heads: int | None) -> int:
    """Width of keys and values."""
    n_kv = check_heads(name, n_heads, n_kv_heads)
    if d_feature % n_heads:
        raise ValueError(
            f"{name}: d_feature {d_feature} is not divisible by n_heads={n_heads}."
        )
    return d_feature // n_heads * n_kv


def _check_sparsity(**given: str | None) -> None:
    for name, value in given.items():
        if value not in (None, "None", "noop"):
            raise ValueError(
                f"AttentionQKV knows {name}='noop' and None only, got {value!r}."
            )

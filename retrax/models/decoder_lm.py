"""`DecoderLM`: a language model of the parts that are usual today.

Above `blocks`, beside `transformer`, whose `TransformerLM` is Trax's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin

from retrax import layers as tl
from retrax.models.blocks import repeated

__all__ = ["DecoderLM"]

_POSITIONS = ("rotary", "alibi", "none")


@gin.configurable(module="retrax.models", denylist=["mode"])
def DecoderLM(
    vocab_size: int,
    d_model: int = 512,
    d_ff: int | None = None,
    n_layers: int = 6,
    n_heads: int = 8,
    n_kv_heads: int | None = None,
    max_len: int = 2048,
    dropout: float = 0.0,
    mode: str = "train",
    positions: str = "rotary",
    rotary_base: float = 10000.0,
    norm: Callable[[], tl.Layer] = tl.RMSNorm,
    feed_forward: Callable[[int], tl.Layer] = tl.SwiGLU,
    use_bias: bool = False,
    attention_chunk: int | None = None,
    scan_layers: bool = False,
    remat: bool = False,
    tie_embeddings: bool = False,
    reversible: bool = False,
) -> tl.Layer:
    """Returns a decoder with RMSNorm, rotary positions, SwiGLU and grouped queries.

    Source: Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2, and
    https://arxiv.org/abs/2307.09288 for grouped queries; initial weights are those of
    our layers.

    Input: ids (batch, length) int in [0, vocab_size). Output: (batch, length,
    vocab_size) float logits; those at t predict id t from ids 0 to t - 1, as the model
    shifts its input right by itself. Batches thus are (ids, ids, weights).

    Args:
      vocab_size: number of ids.
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward parts; None for 8/3 d_model, rounded
        up to a multiple of 64, as three matrices take the place of two.
      n_layers: number of blocks.
      n_heads: number of query heads; divides d_model.
      n_kv_heads: number of key and value heads; divides n_heads; None for n_heads.
      max_len: longest sequence of mode 'predict'.
      dropout: chance of dropping in mode 'train', also for attention weights.
      mode: 'train', 'eval', 'viz', or 'predict', which goes on after the ids of the
        calls before, without a shift; `reset_state()` begins a new sequence.
      positions: 'rotary', 'alibi' or 'none'.
      rotary_base: see `RotaryPositions`.
      norm: makes a normalization.
      feed_forward: makes a layer (..., d_model) -> (..., d_model) from d_ff.
      use_bias: whether the projections of attention add a bias.
      attention_chunk: number of queries handled at a time; None for all.
      scan_layers: puts all blocks into one `Repeat`.
      remat: with scan_layers, computes blocks again in the backward pass instead of
        keeping what is inside them.
      tie_embeddings: makes logits by the weights of the embedding, see `TiedEmbedding`,
        which saves vocab_size * d_model of them.
      reversible: lets attention and feed-forward parts work on two streams in turn, as
        in a Reformer (arXiv 2001.04451, section 3), so that the activations kept for
        the backward pass do not grow with depth. Weights are alike in number and
        shape, but not in what they mean.

    Raises:
      ValueError: sizes or options do not fit; says which.

    Example:
      >>> import jax.numpy as jnp
      >>> lm = DecoderLM(10, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2)
      >>> ids = jnp.array([[5, 6, 7]])
      >>> _ = lm.init(ids)
      >>> lm(ids).shape
      (1, 3, 10)
    """
    if positions not in _POSITIONS:
        raise ValueError(f"positions must be one of {_POSITIONS}, got {positions!r}.")
    if remat and not scan_layers:
        raise ValueError("remat=True needs scan_layers=True, got scan_layers=False.")
    if remat and reversible:
        raise ValueError("reversible=True keeps nothing that remat=True could save.")
    if d_ff is None:
        d_ff = -(-8 * d_model // (3 * 64)) * 64
    rotary = tl.RotaryPositions(rotary_base) if positions == "rotary" else False

    def drop() -> tl.Layer:
        return tl.Dropout(rate=dropout, mode=mode)

    def block() -> list[Any]:
        attention = tl.CausalAttention(
            d_model,
            n_heads,
            dropout,
            max_inference_length=max_len,
            mode=mode,
            n_kv_heads=n_kv_heads,
            use_bias=use_bias,
            rotary=rotary,
            position_bias=tl.AlibiBias(n_heads) if positions == "alibi" else None,
            chunk=attention_chunk,
        )
        parts = [
            [norm(), attention, drop()],
            [norm(), feed_forward(d_ff), drop()],
        ]
        if not reversible:
            return [tl.Residual(*part) for part in parts]
        return [
            [tl.ReversibleHalfResidual(*part), tl.ReversibleSwap()] for part in parts
        ]

    if tie_embeddings:
        embedding = last = tl.TiedEmbedding(vocab_size, d_model)
    else:
        embedding = tl.Embedding(vocab_size, d_model)
        last = tl.Dense(vocab_size, use_bias=False)
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        embedding,
        drop(),
        tl.Dup() if reversible else None,
        repeated(block, n_layers, scan_layers, remat),
        tl.Add() if reversible else None,
        norm(),
        last,
    )

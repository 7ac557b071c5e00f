"""Reformer language models: reversible, for long sequences.

Above `reformer_blocks`, beside `reformer_encdec`. Names and arguments are Trax's; here
`scan_layers` is new. Trax's arguments for sparse layers (`ff_sparsity`,
`loss_sparsity` and those that go with it) are left out, as there are no such layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax.numpy as jnp

from retrax import layers as tl
from retrax.models.blocks import repeated
from retrax.models.reformer_blocks import Positions, ReformerBlocks
from retrax.models.reformer_predict import GroupByGroup

__all__ = ["ReformerLM", "ReformerShortenLM"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def ReformerLM(
    vocab_size: int,
    d_model: int = 512,
    d_ff: int = 2048,
    d_attention_key: int = 64,
    d_attention_value: int = 64,
    n_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    max_len: int = 2048,
    attention_type: Callable[..., tl.Layer] = tl.SelfAttention,
    pos_type: str | None = None,
    pos_axial_shape: Sequence[int] | None = None,
    pos_d_axial_embs: Sequence[int] | None = None,
    pos_start_from_zero_prob: float = 1.0,
    pos_max_offset_to_add: int = 0,
    ff_activation: Callable[[], tl.Layer] = tl.FastGelu,
    ff_use_sru: int = 0,
    ff_chunk_size: int = 0,
    attention_chunk_size: int = 0,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a reversible language model, whose activations do not grow with depth.

    Source: Kitaev et al. 2020 (Reformer), https://arxiv.org/abs/2001.04451.

    Input: ids (batch, length) int in [0, vocab_size). Output: (batch, length,
    vocab_size) float logits; those at t predict id t from ids 0 to t - 1, as the model
    shifts its input right by itself. Batches thus are (ids, ids, weights).

    Args:
      vocab_size: number of ids.
      d_model: width of each of the two streams.
      d_ff: width in the middle of the feed-forward parts.
      d_attention_key: size of a head's queries and keys.
      d_attention_value: size of a head's values.
      n_layers: number of blocks.
      n_heads: number of attention heads.
      dropout: chance of dropping in mode 'train', also for attention weights.
      max_len: longest sequence, also of mode 'predict'.
      attention_type: `SelfAttention`, `LSHSelfAttention` or another function of
        n_heads, d_qk, d_v, causal, masked, mode, attention_dropout and output_dropout.
        What else they take is bound by gin or `functools.partial`; predict_mem_len
        and max_length_for_buckets are max_len.
      pos_type: None for sinusoids, or for 'axial' where pos_axial_shape is given;
        'axial', 'sin-cos', 'infinite' or 'infinite-affine'.
      pos_axial_shape: grid of axial positions, at least max_len places.
      pos_d_axial_embs: sizes of its vectors, with the sum d_model; None for equal ones.
      pos_start_from_zero_prob: see `PositionalEncoding`, and so
      pos_max_offset_to_add.
      ff_activation: makes the activation layer of the feed-forward parts.
      ff_use_sru: number of SRU layers in place of each feed-forward part; 0 for none.
      ff_chunk_size: tokens a feed-forward part handles at a time; 0 for all. It should
        divide batch * length, else all are handled at once.
      attention_chunk_size: rows of the batch attention handles at a time; 0 for all.
      mode: 'train', 'eval', or 'predict', which goes on after the ids of the calls
        before, without a shift; `reset_state()` begins a new sequence.
      scan_layers: puts all blocks into one `Repeat`, so that the time to compile does
        not grow with their number.

    Raises:
      ValueError: sizes or options do not fit; says which.

    Example:
      >>> import jax.numpy as jnp
      >>> lm = ReformerLM(10, d_model=8, d_ff=16, n_layers=2, n_heads=2, mode='eval')
      >>> ids = jnp.array([[5, 6, 7]])
      >>> _ = lm.init(ids)
      >>> lm(ids).shape
      (1, 3, 10)
    """
    blocks = ReformerBlocks(
        d_model,
        d_ff,
        d_attention_key,
        d_attention_value,
        n_heads,
        attention_type,
        dropout,
        ff_activation,
        None,
        ff_use_sru,
        ff_chunk_size,
        attention_chunk_size,
        max_len,
        mode,
    )
    positions = Positions(
        max_len,
        pos_type,
        pos_axial_shape,
        pos_d_axial_embs,
        dropout,
        pos_start_from_zero_prob,
        pos_max_offset_to_add,
    )
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        tl.Embedding(vocab_size, d_model),
        tl.Dropout(dropout, mode=mode),
        positions.layer(d_model, mode),
        tl.Dup(),
        repeated(blocks.decoder, n_layers, scan_layers),
        tl.Concatenate(),
        tl.LayerNorm(),
        tl.Dropout(dropout, mode=mode),
        tl.Dense(vocab_size),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def ReformerShortenLM(
    vocab_size: int,
    shorten_factor: int = 1,
    d_embedding: int = 256,
    d_model: int = 512,
    d_ff: int = 2048,
    d_attention_key: int = 64,
    d_attention_value: int = 64,
    n_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    max_len: int = 2048,
    attention_type: Callable[..., tl.Layer] = tl.SelfAttention,
    pos_type: str | None = None,
    pos_axial_shape: Sequence[int] | None = None,
    pos_d_axial_embs: Sequence[int] | None = None,
    ff_activation: Callable[[], tl.Layer] = tl.FastGelu,
    ff_use_sru: int = 0,
    ff_chunk_size: int = 0,
    attention_chunk_size: int = 0,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a language model whose blocks see groups of shorten_factor ids as one.

    Blocks thus run on sequences shorter by that factor. A group sees the groups before
    it; what its ids have in detail is added by a convolution and a recurrent layer.

    Input, output and mode 'predict', in which the blocks run at the first id of each
    group, are those of `ReformerLM`.

    Args:
      vocab_size: number of ids.
      shorten_factor: ids in a group.
      d_embedding: width of the vectors of single ids.
      d_model: width of each of the two streams of groups.
      pos_axial_shape: see `ReformerLM`; positions are those of single ids, so the sum
        of pos_d_axial_embs is d_embedding.

    The other arguments are those of `ReformerLM`.

    Raises:
      ValueError: sizes or options do not fit; says which.

    Example:
      >>> import jax.numpy as jnp
      >>> sizes = dict(d_embedding=4, d_model=8, d_ff=16, n_layers=1, n_heads=2)
      >>> lm = ReformerShortenLM(10, shorten_factor=2, mode='eval', **sizes)
      >>> ids = jnp.array([[5, 6, 7, 8]])
      >>> _ = lm.init(ids)
      >>> lm(ids).shape
      (1, 4, 10)
    """
    if shorten_factor < 1:
        raise ValueError(f"shorten_factor must be at least 1, got {shorten_factor}.")
    blocks = ReformerBlocks(
        d_model,
        d_ff,
        d_attention_key,
        d_attention_value,
        n_heads,
        attention_type,
        dropout,
        ff_activation,
        None,
        ff_use_sru,
        ff_chunk_size,
        attention_chunk_size,
        -(-max_len // shorten_factor),
        mode,
    )
    positions = Positions(max_len, pos_type, pos_axial_shape, pos_d_axial_embs, dropout)
    of_groups = tl.Serial(
        tl.Dense(d_model),
        tl.Dup(),
        repeated(blocks.decoder, n_layers, scan_layers),
        tl.Concatenate(),
        tl.LayerNorm(),
        tl.Dropout(dropout, mode=mode),
        tl.Dense(shorten_factor * d_embedding),
    )
    shortened: list[tl.Layer] = [
        _Grouped(shorten_factor),
        of_groups,
        _Ungrouped(shorten_factor),
    ]
    if mode == "predict":
        shortened = [
            tl.Fn("Vectors", lambda x: x),
            GroupByGroup(of_groups, shorten_factor),
            tl.Fn("Parts", lambda x: x),
        ]
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        tl.Embedding(vocab_size, d_embedding),
        tl.Dropout(dropout, mode=mode),
        positions.layer(d_embedding, mode),
        tl.Dup(),  # For the groups; the other one stays below for the details.
        shortened,
        tl.Concatenate(),
        tl.CausalConv(d_embedding, mode=mode),
        tl.Relu(),
        tl.SRU(d_embedding, mode=mode),
        tl.Dense(vocab_size),
    )


# --- Helpers ------------------------------------------------------------------------


def _Grouped(n: int) -> tl.Layer:
    """Makes a layer (batch, length, d) -> (batch, length / n rounded up, n * d).

    Group i has the vectors n * i - n + 1 to n * i. As vector t is that of id t - 1, it
    thus knows the ids before n * i, where the group's own ones begin.
    """

    def group(x: Any) -> Any:
        n_groups = -(-x.shape[1] // n)
        x = jnp.pad(x, ((0, 0), (n - 1, n_groups * n - x.shape[1]), (0, 0)))
        x = x[:, : n_groups * n]
        return jnp.reshape(x, (x.shape[0], n_groups, n * x.shape[2]))

    return tl.Fn(f"Grouped_{n}", group)


def _Ungrouped(n: int) -> tl.Layer:
    """Makes a layer (groups, vectors) -> (their parts, as many as vectors; vectors).

    groups: (batch, length, n * d), vectors: (batch, at most n * length, d).
    """

    def ungroup(x: Any, vectors: Any) -> tuple[Any, Any]:
        parts = jnp.reshape(x, (x.shape[0], x.shape[1] * n, x.shape[2] // n))
        return parts[:, : vectors.shape[1]], vectors

    return tl.Fn(f"Ungrouped_{n}", ungroup, n_out=2)

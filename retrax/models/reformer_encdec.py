"""Reformers from one sequence to another: `Reformer` and `Reformer2`.

Above `reformer_blocks`, beside `reformer`. Names and arguments are Trax's, without
those for sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax.numpy as jnp

from retrax import layers as tl
from retrax.models.blocks import repeated
from retrax.models.reformer_blocks import Positions, ReformerBlocks
from retrax.models.reformer_predict import SourceThenTarget

__all__ = ["Reformer", "Reformer2"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def Reformer(
    input_vocab_size: int,
    output_vocab_size: int | None = None,
    d_model: int = 512,
    d_ff: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    max_len: int = 2048,
    ff_activation: Callable[[], tl.Layer] = tl.Relu,
    ff_dropout: float | None = None,
    mode: str = "train",
    pos_type: str | None = None,
    pos_axial_shape: Sequence[int] | None = None,
    pos_d_axial_embs: Sequence[int] | None = None,
    ff_use_sru: int = 0,
    ff_chunk_size: int = 0,
    attention_type: Callable[..., tl.Layer] = tl.SelfAttention,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a reversible encoder-decoder, whose decoder attends to the source.

    Source: Kitaev et al. 2020 (Reformer), https://arxiv.org/abs/2001.04451.

    Inputs, outputs and mode 'predict' are those of `Transformer`: source ids (batch,
    source length) int and target ids (batch, target length) int, 0 being padding;
    logits (batch, target length, output_vocab_size) float, and the target ids once
    more.

    Args:
      input_vocab_size: number of source ids.
      output_vocab_size: number of target ids; None shares ids and embedding with the
        source.
      d_model: width of each of the two streams.
      d_ff: width in the middle of the feed-forward parts.
      n_encoder_layers: number of encoder blocks.
      n_decoder_layers: number of decoder blocks.
      n_heads: number of attention heads; divides d_model.
      dropout: chance of dropping in mode 'train', also for attention weights.
      max_len: longest source or target, also of mode 'predict'.
      ff_activation: makes the activation layer of the feed-forward parts.
      ff_dropout: chance of dropping in their middle; None for `dropout`.
      mode: 'train', 'eval' or 'predict'.
      pos_type: see `ReformerLM`, and so pos_axial_shape, pos_d_axial_embs, ff_use_sru,
        ff_chunk_size, and attention_type, which is that of encoder and decoder.
      scan_layers: puts the encoder's blocks into one `Repeat`, the decoder's into
        another.

    Raises:
      ValueError: sizes or options do not fit; says which.

    Example:
      >>> import jax.numpy as jnp
      >>> sizes = dict(d_model=8, d_ff=16, n_heads=2, n_encoder_layers=1)
      >>> model = Reformer(10, n_decoder_layers=1, mode='eval', **sizes)
      >>> source, target = jnp.array([[5, 6, 7, 0]]), jnp.array([[7, 6, 5]])
      >>> _ = model.init((source, target))
      >>> logits, same_target = model((source, target))
      >>> logits.shape
      (1, 3, 10)
    """
    blocks = _blocks(
        d_model,
        d_ff,
        n_heads,
        attention_type,
        dropout,
        ff_activation,
        ff_dropout,
        ff_use_sru,
        ff_chunk_size,
        max_len,
        mode,
    )
    positions = Positions(max_len, pos_type, pos_axial_shape, pos_d_axial_embs, dropout)
    parts = _Ends(blocks, positions, input_vocab_size, output_vocab_size)
    return tl.Serial(
        tl.Select([0, 1, 1]),  # source, target, target; the last one for the loss
        tl.Branch([], _flags()),  # source, mask, target, target
        tl.Cache(parts.encoder(n_encoder_layers, scan_layers), mode=mode),
        tl.Select([2, 0, 1]),  # target, encoded, mask, target
        tl.ShiftRight(mode=mode),
        parts.embedded(parts.target_embedding, mode),
        tl.Dup(),  # x1, x2, encoded, mask, target
        repeated(blocks.encoder_decoder, n_decoder_layers, scan_layers),
        _Mean(),
        tl.LayerNorm(),
        tl.Select([0], n_in=3),  # vectors, target
        tl.Dense(parts.n_outputs),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def Reformer2(
    input_vocab_size: int,
    output_vocab_size: int | None = None,
    d_model: int = 512,
    d_ff: int = 2048,
    d_attention_key: int | None = None,
    d_attention_value: int | None = None,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    max_len: int = 2048,
    encoder_attention_type: Callable[..., tl.Layer] = tl.SelfAttention,
    encoder_decoder_attention_type: Callable[..., tl.Layer] = tl.SelfAttention,
    pos_type: str | None = None,
    pos_axial_shape: Sequence[int] | None = None,
    pos_d_axial_embs: Sequence[int] | None = None,
    ff_activation: Callable[[], tl.Layer] = tl.Relu,
    ff_use_sru: int = 0,
    ff_chunk_size: int = 0,
    ff_dropout: float | None = None,
    attention_chunk_size: int = 0,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a reversible encoder-decoder that decodes source and target in one row.

    The encoded source, without its padding, and the target follow one another in one
    sequence, over which the blocks of a causal decoder run. So one kind of attention
    does for both, LSH attention among them.

    Inputs, outputs and mode 'predict' are those of `Reformer`; a row's caches hold its
    source first.

    Unlike Trax's it forgets no layers, has one attention in a block, and no options for
    the order of swaps; its encoder is reversible.

    Args:
      input_vocab_size: number of source ids.
      output_vocab_size: number of target ids; None shares ids and embedding with the
        source.
      d_model: width of each of the two streams.
      d_ff: width in the middle of the feed-forward parts.
      d_attention_key: size of a head's queries and keys; None for d_model / n_heads.
      d_attention_value: size of a head's values; None for d_model / n_heads.
      n_encoder_layers: number of encoder blocks.
      n_decoder_layers: number of decoder blocks.
      encoder_attention_type: attention of the encoder, see `ReformerLM`.
      encoder_decoder_attention_type: attention over source and target.
      attention_chunk_size: rows of the batch attention handles at a time; 0 for all.

    The other arguments are those of `Reformer`.

    Raises:
      ValueError: sizes or options do not fit; says which.
    """
    both = []
    for kind in (encoder_attention_type, encoder_decoder_attention_type):
        blocks = _blocks(
            d_model,
            d_ff,
            n_heads,
            kind,
            dropout,
            ff_activation,
            ff_dropout,
            ff_use_sru,
            ff_chunk_size,
            # Source and target are in one sequence.
            max_len if not both else 2 * max_len,
            mode,
            d_attention_key,
            d_attention_value,
            attention_chunk_size,
        )
        both.append(blocks)
    positions = Positions(max_len, pos_type, pos_axial_shape, pos_d_axial_embs, dropout)
    parts = _Ends(both[0], positions, input_vocab_size, output_vocab_size)
    decoder = tl.Serial(
        tl.Dup(),
        repeated(both[1].decoder, n_decoder_layers, scan_layers),
        _Mean(),
        tl.LayerNorm(),
    )
    # From (target, encoded, mask, target, target) to (vectors of the target, target).
    decoded: list[tl.Layer] = [_Joined(), decoder, _Parted()]
    if mode == "predict":
        first = tl.Fn("OfTarget", lambda y, flags, target: y)
        decoded = [tl.Fn("Vectors", lambda x: x), SourceThenTarget(decoder), first]
    return tl.Serial(
        tl.Select([0, 1, 1]),
        tl.Branch([], _flags()),  # source, mask, target, target
        tl.Cache(parts.encoder(n_encoder_layers, scan_layers), mode=mode),
        tl.Select([2, 0, 1, 2]),
        tl.ShiftRight(mode=mode),
        parts.embedded(parts.target_embedding, mode),
        decoded,
        tl.Dense(parts.n_outputs),
    )


# --- Helpers ------------------------------------------------------------------------


def _blocks(
    d_model: int,
    d_ff: int,
    n_heads: int,
    attention_type: Callable[..., tl.Layer],
    dropout: float,
    ff_activation: Callable[[], tl.Layer],
    ff_dropout: float | None,
    ff_use_sru: int,
    ff_chunk_size: int,
    max_len: int,
    mode: str,
    d_key: int | None = None,
    d_value: int | None = None,
    attention_chunk_size: int = 0,
) -> ReformerBlocks:
    """Sizes of heads are d_model / n_heads where none are given."""
    if n_heads < 1 or (d_model % n_heads and None in (d_key, d_value)):
        raise ValueError(
            f"n_heads={n_heads} has to divide d_model={d_model}, which makes the size "
            "of a head."
        )
    return ReformerBlocks(
        d_model,
        d_ff,
        d_key or d_model // n_heads,
        d_value or d_model // n_heads,
        n_heads,
        attention_type,
        dropout,
        ff_activation,
        ff_dropout,
        ff_use_sru,
        ff_chunk_size,
        attention_chunk_size,
        max_len,
        mode,
    )


class _Ends:
    """What the two models have in common: embeddings and the encoder."""

    def __init__(
        self,
        blocks: ReformerBlocks,
        positions: Positions,
        input_vocab_size: int,
        output_vocab_size: int | None,
    ) -> None:
        self._blocks, self._positions = blocks, positions
        d = blocks.d_model
        self._source_embedding = tl.Embedding(input_vocab_size, d)
        self.target_embedding = self._source_embedding
        self.n_outputs = input_vocab_size
        if output_vocab_size is not None:
            self.target_embedding = tl.Embedding(output_vocab_size, d)
            self.n_outputs = output_vocab_size

    def embedded(self, embedding: tl.Layer, mode: str) -> list[tl.Layer]:
        """Makes what takes ids to vectors."""
        drop = tl.Dropout(self._blocks.dropout, mode=mode)
        return [embedding, drop, self._positions.layer(self._blocks.d_model, mode)]

    def encoder(self, n_layers: int, scan_layers: bool) -> tl.Layer:
        """Makes (source ids, flags) -> (encoded, flags)."""
        return tl.Serial(
            self.embedded(self._source_embedding, self._blocks.encoder_mode),
            tl.Dup(),
            repeated(self._blocks.encoder, n_layers, scan_layers),
            _Mean(),
            tl.LayerNorm(),
        )


def _flags() -> tl.Layer:
    """Makes ids -> (batch, length) bool, true where there is no padding."""
    return tl.Fn("IsNoPadding", lambda ids: ids != 0)


def _Mean() -> tl.Layer:
    return tl.Fn("MeanOfStreams", lambda x1, x2: (x1 + x2) / 2)


def _Joined() -> tl.Layer:
    """Makes (target, source, flags) -> (source and target in a row, flags).

    vectors: (batch, length, d); flags: (batch, source length), whose true ones come
    first. Row i has its targets right after its real sources, and zeros after them.
    """

    def join(target: Any, source: Any, flags: Any) -> Any:
        n_source, n_target = source.shape[1], target.shape[1]
        start = jnp.sum(flags, axis=1, dtype=jnp.int32)[:, None]
        places = jnp.arange(n_source + n_target)[None]
        of_source = jnp.pad(source, ((0, 0), (0, n_target), (0, 0)))
        which = jnp.clip(places - start, 0, n_target - 1)
        of_target = jnp.take_along_axis(target, which[..., None], axis=1)
        inside = (places < start + n_target)[..., None]
        joined = jnp.where((places < start)[..., None], of_source, of_target)
        return jnp.where(inside, joined, 0), flags

    return tl.Fn("JoinSourceAndTarget", join, n_out=2)


def _Parted() -> tl.Layer:
    """Makes (source and target in a row, flags, target ids) -> target's vectors."""

    def part(joined: Any, flags: Any, target: Any) -> Any:
        start = jnp.sum(flags, axis=1, dtype=jnp.int32)[:, None]
        places = start + jnp.arange(target.shape[1])[None]
        return jnp.take_along_axis(joined, places[..., None], axis=1)

    return tl.Fn("PartTarget", part)

"""What Reformers repeat: reversible blocks, and positions chosen by name.

Beside `blocks`, under `reformer` and `reformer_encdec`. Compositions only. A block
works on two streams (x1, x2) on top of the stack: y1 = x1 + Attention(x2), then
y2 = x2 + FeedForward(y1), so that its inputs can be found from its outputs (Kitaev et
al. 2020, https://arxiv.org/abs/2001.04451, section 3).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from retrax import layers as tl

__all__ = ["Positions", "ReformerBlocks"]

_KINDS = (None, "axial", "sin-cos", "infinite", "infinite-affine")


@dataclasses.dataclass(frozen=True)
class Positions:
    """Makes the layer that adds positions.

    Args:
      max_len: longest sequence.
      kind: None for sinusoids, or for 'axial' where axial_shape is given; 'axial',
        'sin-cos', 'infinite' or 'infinite-affine'.
      axial_shape: grid of 'axial', at least max_len places.
      d_axial_embs: sizes of its vectors; None for equal parts.
      dropout: chance of an entry of the vectors to be dropped in mode 'train'.
      start_from_zero_prob: of sinusoids, see `PositionalEncoding`.
      max_offset_to_add: of sinusoids, see `PositionalEncoding`.
    """

    max_len: int
    kind: str | None = None
    axial_shape: Sequence[int] | None = None
    d_axial_embs: Sequence[int] | None = None
    dropout: float = 0.0
    start_from_zero_prob: float = 1.0
    max_offset_to_add: int = 0

    def layer(self, d: int, mode: str) -> tl.Layer:
        """Makes the layer for vectors of size d.

        Raises:
          ValueError: the kind is unknown, or the grid does not fit.
        """
        if self.kind not in _KINDS:
            raise ValueError(f"pos_type must be one of {_KINDS}, got {self.kind!r}.")
        if self.kind == "sin-cos":
            return tl.SinCosPositionalEncoding(dropout=self.dropout, mode=mode)
        if self.kind in ("infinite", "infinite-affine"):
            affine = self.kind == "infinite-affine"
            return tl.InfinitePositionalEncoding(affine=affine, mode=mode)
        if self.kind == "axial" or self.axial_shape:
            return self._axial(d, mode)
        return tl.PositionalEncoding(
            self.max_len,
            self.dropout,
            start_from_zero_prob=self.start_from_zero_prob,
            max_offset_to_add=self.max_offset_to_add,
            mode=mode,
        )

    def _axial(self, d: int, mode: str) -> tl.Layer:
        shape = tuple(self.axial_shape or ())
        if not shape or math.prod(shape) < self.max_len:
            raise ValueError(
                f"axial positions need a pos_axial_shape of at least max_len="
                f"{self.max_len} places, got {shape}, which is "
                f"{math.prod(shape) if shape else 0}."
            )
        sizes = self.d_axial_embs
        if sizes is None:
            n = len(shape)
            sizes = [d // n + (i < d % n) for i in range(n)]
        if len(sizes) != len(shape) or sum(sizes) != d:
            raise ValueError(
                f"pos_d_axial_embs must be one size for each axis of pos_axial_shape="
                f"{shape}, with the sum {d}, got {tuple(sizes)}."
            )
        return tl.AxialPositionalEncoding(shape, sizes, dropout=self.dropout, mode=mode)


@dataclasses.dataclass(frozen=True)
class ReformerBlocks:
    """Makes the blocks of one Reformer, which share sizes, dropout and mode.

    Args:
      d_model: width of each stream.
      d_ff: width in the middle of the feed-forward part.
      d_attention_key: size of a head's queries and keys.
      d_attention_value: size of a head's values.
      n_heads: number of attention heads.
      attention_type: makes self-attention, see `ReformerLM`.
      dropout: chance of dropping in mode 'train', also for attention weights.
      ff_activation: makes the activation layer of the feed-forward part.
      ff_dropout: chance of dropping in its middle; None for `dropout`.
      ff_use_sru: number of SRU layers in place of the feed-forward part; 0 for none.
      ff_chunk_size: tokens it handles at a time; 0 for all.
      attention_chunk_size: rows of the batch attention handles at a time; 0 for all.
      max_len: longest sequence of mode 'predict'.
      mode: 'train', 'eval' or 'predict'.
    """

    d_model: int
    d_ff: int
    d_attention_key: int
    d_attention_value: int
    n_heads: int
    attention_type: Callable[..., tl.Layer]
    dropout: float
    ff_activation: Callable[[], tl.Layer]
    ff_dropout: float | None
    ff_use_sru: int
    ff_chunk_size: int
    attention_chunk_size: int
    max_len: int
    mode: str

    @property
    def encoder_mode(self) -> str:
        """The mode of encoders, which see all of their input at once."""
        return "eval" if self.mode == "predict" else self.mode

    def decoder(self) -> list[tl.Layer]:
        """Makes a block (x1, x2) -> (y1, y2) whose positions see those before them."""
        return [*self._residual(self._causal()), *self._feed_forward(self.mode)]

    def encoder(self) -> list[tl.Layer]:
        """Makes a block (x1, x2, mask) -> (y1, y2, mask), mask (batch, length)."""
        attention = self._attention(self.encoder_mode, causal=False, masked=True)
        return [*self._residual(attention), *self._feed_forward(self.encoder_mode)]

    def encoder_decoder(self) -> list[tl.Layer]:
        """Makes a block (x1, x2, source, mask) -> (y1, y2, source, mask).

        It has three parts, so that streams change roles from block to block.
        """
        to_source = tl.EncDecAttention(
            n_heads=self.n_heads,
            d_qk=self.d_attention_key,
            d_v=self.d_attention_value,
            mode=self.mode,
            attention_dropout=self._dropout(self.mode),
            output_dropout=self._dropout(self.mode),
        )
        return [
            *self._residual(self._causal()),
            *self._residual(self._chunked(to_source, self.mode)),
            *self._feed_forward(self.mode),
        ]

    def _causal(self) -> tl.Layer:
        return self._attention(self.mode, causal=True, masked=False)

    def _attention(self, mode: str, causal: bool, masked: bool) -> tl.Layer:
        given: dict[str, Any] = dict(
            n_heads=self.n_heads,
            d_qk=self.d_attention_key,
            d_v=self.d_attention_value,
            causal=causal,
            masked=masked,
            mode=mode,
            attention_dropout=self._dropout(mode),
            output_dropout=self._dropout(mode),
        )
        # What not all types take. Buckets go by max_len, so that hashes are the same
        # for a prompt, for what follows it, and in all modes.
        known = inspect.signature(self.attention_type).parameters
        for name in ("predict_mem_len", "max_length_for_buckets"):
            if name in known:
                given[name] = self.max_len
        return self._chunked(self.attention_type(**given), mode)

    def _chunked(self, attention: tl.Layer, mode: str) -> tl.Layer:
        # A cache belongs to all rows of a batch.
        size = 0 if mode == "predict" else self.attention_chunk_size
        return tl.Chunk(attention, size)

    def _feed_forward(self, mode: str) -> list[tl.Layer]:
        if self.ff_use_sru:
            units = [tl.SRU(self.d_model, mode=mode) for _ in range(self.ff_use_sru)]
            return self._residual(*units)
        middle = self.dropout if self.ff_dropout is None else self.ff_dropout
        layers: list[tl.Layer] = [
            tl.Dense(self.d_ff),
            self.ff_activation(),
            tl.Dropout(middle, mode=mode),
            tl.Dense(self.d_model),
            tl.Dropout(self.dropout, mode=mode),
        ]
        if self.ff_chunk_size:
            chunked = tl.Chunk(tl.Serial(layers), self.ff_chunk_size)
            layers = [tl.BatchLeadingAxes(chunked)]
        return self._residual(*layers)

    def _residual(self, *layers: tl.Layer) -> list[tl.Layer]:
        half = tl.ReversibleHalfResidual(tl.LayerNorm(), *layers)
        return [half, tl.ReversibleSwap()]

    def _dropout(self, mode: str) -> float:
        return self.dropout if mode == "train" else 0.0

"""Blocks that models repeat: those of Transformers, and stacks of equal blocks.

Under all models, above the layers. Compositions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from retrax import layers as tl

__all__ = ["TransformerBlocks", "repeated"]


def repeated(
    block_fn: Callable[[], Any], n: int, scan_layers: bool, remat: bool = False
) -> list[Any]:
    """Returns n equal blocks in a row.

    Args:
      block_fn: makes one block, a layer or a list of layers.
      n: number of blocks; may be 0.
      scan_layers: gives one `Repeat` of them, whose time to compile does not grow with
        n, in place of n blocks.
      remat: see `Repeat`.

    Raises:
      ValueError: n is negative.
    """
    if n < 0:
        raise ValueError(f"a model cannot have {n} blocks; give 0 or more.")
    if scan_layers and n:
        return [tl.Repeat(block_fn, n, remat=remat)]
    return [block_fn() for _ in range(n)]


@dataclasses.dataclass(frozen=True)
class TransformerBlocks:
    """Makes the blocks of one Transformer, which share sizes, dropout and mode.

    Blocks normalize before each part and add after it (Xiong et al. 2020,
    https://arxiv.org/abs/2002.04745), not as in Vaswani et al. 2017.

    Args:
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward part.
      n_heads: number of attention heads; divides d_model.
      max_len: longest sequence that mode 'predict' keeps.
      dropout: chance of dropping, also for attention weights.
      dropout_shared_axes: axes along which values are dropped together.
      mode: 'train', 'eval', 'predict' or 'viz'.
      ff_activation: makes the activation layer of the feed-forward part.
    """

    d_model: int
    d_ff: int
    n_heads: int
    max_len: int
    dropout: float
    dropout_shared_axes: Sequence[int] | None
    mode: str
    ff_activation: Callable[[], tl.Layer]

    @property
    def encoder_mode(self) -> str:
        """The mode of encoders, which see all of their input at once."""
        return "eval" if self.mode == "predict" else self.mode

    def drop(self) -> tl.Layer:
        """Makes a dropout layer."""
        return tl.Dropout(self.dropout, self.dropout_shared_axes, self.mode)

    def positions(self, mode: str) -> tl.Layer:
        """Makes the layer that adds positions."""
        return tl.PositionalEncoding(max_len=self.max_len, mode=mode)

    def embedded(self, embedding: tl.Layer, mode: str) -> list[tl.Layer]:
        """Makes what takes ids, or other inputs, to vectors that blocks take."""
        return [embedding, self.drop(), self.positions(mode)]

    def encoder(self) -> list[tl.Layer]:
        """Makes a block (vectors, mask) -> (vectors, mask)."""
        attention = tl.Attention(
            self.d_model, self.n_heads, self.dropout, self.encoder_mode
        )
        return [
            tl.Residual(tl.LayerNorm(), attention, self.drop()),
            self._feed_forward(),
        ]

    def decoder(self) -> list[tl.Layer]:
        """Makes a block vectors -> vectors, each of which sees those before it."""
        return [self._causal(), self._feed_forward()]

    def encoder_decoder(self) -> list[tl.Layer]:
        """Makes a block (decoder vectors, mask, encoder vectors) -> the same."""
        attention = tl.AttentionQKV(
            self.d_model,
            self.n_heads,
            self.dropout,
            self.mode,
            cache_KV_in_predict=True,
        )
        return [
            self._causal(),
            tl.Residual(
                tl.LayerNorm(),
                tl.Select([0, 2, 2, 1, 2]),  # decoder, encoder, encoder, mask, encoder
                attention,
                self.drop(),
            ),
            self._feed_forward(),
        ]

    def _causal(self) -> tl.Layer:
        attention = tl.CausalAttention(
            self.d_model,
            self.n_heads,
            self.dropout,
            max_inference_length=self.max_len,
            mode=self.mode,
        )
        return tl.Residual(tl.LayerNorm(), attention, self.drop())

    def _feed_forward(self) -> tl.Layer:
        return tl.Residual(
            tl.LayerNorm(),
            tl.Dense(self.d_ff),
            self.ff_activation(),
            self.drop(),
            tl.Dense(self.d_model),
            self.drop(),
        )

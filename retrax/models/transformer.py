"""Transformers of one stack: encoder, decoder and language model.

Above `blocks`; the encoder-decoder is in `transformer_encdec`. Names, arguments and
order of layers are Trax's. Here `scan_layers` is new: it puts the blocks into one
`Repeat`, so that the time to compile does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin

from retrax import layers as tl
from retrax.models.blocks import TransformerBlocks, repeated

__all__ = ["TransformerDecoder", "TransformerEncoder", "TransformerLM"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def TransformerEncoder(
    vocab_size: int,
    n_classes: int = 10,
    d_model: int = 512,
    d_ff: int = 2048,
    n_layers: int = 6,
    n_heads: int = 8,
    max_len: int = 2048,
    dropout: float = 0.1,
    dropout_shared_axes: Sequence[int] | None = None,
    mode: str = "train",
    ff_activation: Callable[[], tl.Layer] = tl.Relu,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a Transformer that classifies sequences of ids.

    Input: ids (batch, length) int in [0, vocab_size), 0 being padding, which attention
    does not see. Output: (batch, n_classes) float logits. As in Trax they come from the
    mean over all positions, those of padding too, so a batch that is padded more gives
    somewhat other logits.

    Args:
      vocab_size: number of ids.
      n_classes: number of classes.
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward parts.
      n_layers: number of blocks.
      n_heads: number of attention heads; divides d_model.
      max_len: longest sequence.
      dropout: chance of dropping in mode 'train', also for attention weights.
      dropout_shared_axes: axes along which values are dropped together.
      mode: 'train', 'eval' or 'viz'; 'predict' is 'eval', as nothing is decoded.
      ff_activation: makes the activation layer of the feed-forward parts.
      scan_layers: puts all blocks into one `Repeat`.

    Raises:
      ValueError: sizes do not fit; says which.
    """
    blocks = TransformerBlocks(
        d_model,
        d_ff,
        n_heads,
        max_len,
        dropout,
        dropout_shared_axes,
        mode,
        ff_activation,
    )
    return tl.Serial(
        tl.Branch([], tl.PaddingMask()),
        blocks.embedded(tl.Embedding(vocab_size, d_model), blocks.encoder_mode),
        repeated(blocks.encoder, n_layers, scan_layers),
        tl.Select([0], n_in=2),  # Drops the mask.
        tl.LayerNorm(),
        tl.Mean(axis=1),
        tl.Dense(n_classes),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def TransformerDecoder(
    vocab_size: int | None = None,
    d_model: int = 512,
    d_ff: int = 2048,
    n_layers: int = 6,
    n_heads: int = 8,
    max_len: int = 2048,
    dropout: float = 0.1,
    dropout_shared_axes: Sequence[int] | None = None,
    mode: str = "train",
    ff_activation: Callable[[], tl.Layer] = tl.Relu,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a Transformer that maps each position and those before it to a vector.

    Input: ids (batch, length) int, or without a vocabulary vectors (batch, length, d)
    float, which a dense layer takes to d_model. Output: (batch, length, d_model) float.
    The input is not shifted: output t sees inputs 0 to t.

    Args:
      vocab_size: number of ids; None for vectors.
      d_model: width of the vectors between blocks, and of the output.
      mode: 'train', 'eval', 'viz', or 'predict', which goes on after the tokens of the
        calls before; `reset_state()` begins a new sequence.

    The other arguments are those of `TransformerLM`.
    """
    blocks = TransformerBlocks(
        d_model,
        d_ff,
        n_heads,
        max_len,
        dropout,
        dropout_shared_axes,
        mode,
        ff_activation,
    )
    to_vectors = (
        tl.Dense(d_model) if vocab_size is None else tl.Embedding(vocab_size, d_model)
    )
    return tl.Serial(
        blocks.embedded(to_vectors, mode),
        repeated(blocks.decoder, n_layers, scan_layers),
        tl.LayerNorm(),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def TransformerLM(
    vocab_size: int,
    d_model: int = 512,
    d_ff: int = 2048,
    n_layers: int = 6,
    n_heads: int = 8,
    max_len: int = 2048,
    dropout: float = 0.1,
    dropout_shared_axes: Sequence[int] | None = None,
    mode: str = "train",
    ff_activation: Callable[[], tl.Layer] = tl.Relu,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a Transformer language model.

    Input: ids (batch, length) int in [0, vocab_size). Output: (batch, length,
    vocab_size) float logits; those at t predict id t from ids 0 to t - 1, as the model
    shifts its input right by itself. Batches thus are (ids, ids, weights).

    In mode 'predict' nothing is shifted: each call takes the next ids, any number of
    them, the first being 0, and gives the logits of the id after each.

    Args:
      vocab_size: number of ids.
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward parts.
      n_layers: number of blocks.
      n_heads: number of attention heads; divides d_model.
      max_len: longest sequence, also of mode 'predict'.
      dropout: chance of dropping in mode 'train', also for attention weights.
      dropout_shared_axes: axes along which values are dropped together.
      mode: 'train', 'eval', 'viz', or 'predict', which goes on after the ids of the
        calls before; `reset_state()` begins a new sequence.
      ff_activation: makes the activation layer of the feed-forward parts.
      scan_layers: puts all blocks into one `Repeat`.

    Raises:
      ValueError: sizes do not fit; says which.

    Example:
      >>> import jax.numpy as jnp
      >>> lm = TransformerLM(10, d_model=8, d_ff=16, n_layers=2, n_heads=2, mode='eval')
      >>> ids = jnp.array([[5, 6, 7]])
      >>> _ = lm.init(ids)
      >>> lm(ids).shape
      (1, 3, 10)
    """
    blocks = TransformerBlocks(
        d_model,
        d_ff,
        n_heads,
        max_len,
        dropout,
        dropout_shared_axes,
        mode,
        ff_activation,
    )
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        blocks.embedded(tl.Embedding(vocab_size, d_model), mode),
        repeated(blocks.decoder, n_layers, scan_layers),
        tl.LayerNorm(),
        tl.Dense(vocab_size),
    )

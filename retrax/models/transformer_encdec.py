"""`Transformer`: encoder and decoder, from one sequence to another.

Above `blocks`, beside `transformer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin

from retrax import layers as tl
from retrax.models.blocks import TransformerBlocks, repeated

__all__ = ["Transformer"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def Transformer(
    input_vocab_size: int,
    output_vocab_size: int | None = None,
    d_model: int = 512,
    d_ff: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    n_heads: int = 8,
    max_len: int = 2048,
    dropout: float = 0.1,
    dropout_shared_axes: Sequence[int] | None = None,
    mode: str = "train",
    ff_activation: Callable[[], tl.Layer] = tl.Relu,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns an encoder-decoder Transformer.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, but with the
    normalization before each part, see `TransformerBlocks`.

    Inputs: source ids (batch, source length) int and target ids (batch, target length)
    int; 0 is padding, which attention to the source does not see. Outputs: logits
    (batch, target length, output_vocab_size) float, and the target ids once more, for
    the loss. Logits at t predict target t from the source and targets 0 to t - 1, as
    the model shifts targets right by itself. Batches are (source, target, weights).

    In mode 'predict' the first call takes (source, first target ids), and later calls
    the same source with the next ids; only the first one runs the encoder. The ids
    begin with 0, as nothing is shifted. `reset_state()` begins a new pair.

    Args:
      input_vocab_size: number of source ids.
      output_vocab_size: number of target ids; None shares ids and embedding with the
        source.
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward parts.
      n_encoder_layers: number of encoder blocks.
      n_decoder_layers: number of decoder blocks.
      n_heads: number of attention heads; divides d_model.
      max_len: longest source or target, also of mode 'predict'.
      dropout: chance of dropping in mode 'train', also for attention weights.
      dropout_shared_axes: axes along which values are dropped together.
      mode: 'train', 'eval', 'predict' or 'viz'.
      ff_activation: makes the activation layer of the feed-forward parts.
      scan_layers: puts the encoder's blocks into one `Repeat`, the decoder's into
        another.

    Raises:
      ValueError: sizes do not fit; says which.

    Example:
      >>> import jax.numpy as jnp
      >>> sizes = dict(d_model=8, d_ff=16, n_heads=2, n_encoder_layers=1)
      >>> model = Transformer(10, n_decoder_layers=1, mode='eval', **sizes)
      >>> source, target = jnp.array([[5, 6, 7, 0]]), jnp.array([[7, 6, 5]])
      >>> _ = model.init((source, target))
      >>> logits, same_target = model((source, target))
      >>> logits.shape
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
    source_embedding = tl.Embedding(input_vocab_size, d_model)
    target_embedding = source_embedding
    if output_vocab_size is not None:
        target_embedding = tl.Embedding(output_vocab_size, d_model)
    encoder = tl.Serial(
        blocks.embedded(source_embedding, blocks.encoder_mode),
        repeated(blocks.encoder, n_encoder_layers, scan_layers),
        tl.LayerNorm(),
    )
    return tl.Serial(
        tl.Select([0, 1, 1]),  # source, target, target; the last one for the loss
        tl.Branch([], tl.PaddingMask()),  # source, mask, target, target
        tl.Cache(encoder, mode=mode),
        tl.Select([2, 1, 0]),  # target, mask, encoded, target
        tl.ShiftRight(mode=mode),
        blocks.embedded(target_embedding, mode),
        tl.Branch([], tl.EncoderDecoderMask()),  # vectors, mask, encoded, target
        repeated(blocks.encoder_decoder, n_decoder_layers, scan_layers),
        tl.LayerNorm(),
        tl.Select([0], n_in=3),  # vectors, target
        tl.Dense(input_vocab_size if output_vocab_size is None else output_vocab_size),
    )

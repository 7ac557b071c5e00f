"""Recurrent models: language models, and a translator with attention.

Above `blocks`. Names, arguments and order of layers are Trax's. All of them decode: in
mode 'predict' a call goes on after the ids of the calls before, nothing is shifted, and
`reset_state()` begins a new sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import gin

from retrax import layers as tl
from retrax.models.blocks import repeated

__all__ = ["GRULM", "LSTMSeq2SeqAttn", "RNNLM"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def RNNLM(
    vocab_size: int,
    d_model: int = 512,
    n_layers: int = 2,
    rnn_cell: Callable[..., tl.Layer] = tl.LSTMCell,
    rnn_cell_d_state_multiplier: int = 2,
    dropout: float = 0.1,
    mode: str = "train",
) -> tl.Layer:
    """Returns a language model of recurrent cells, by default LSTM cells.

    Input: ids (batch, length) int in [0, vocab_size). Output: (batch, length,
    vocab_size) float logits; those at t predict id t from ids 0 to t - 1, as the model
    shifts its input right by itself. Trax allows two layers only.

    Args:
      vocab_size: number of ids.
      d_model: width of embedding and of each layer's output.
      n_layers: number of layers, all of which make a step before the next step.
      rnn_cell: makes a cell from n_units=d_model: (x, state) -> (y, state).
      rnn_cell_d_state_multiplier: size of a cell's state over d_model: 2 for an LSTM
        cell, 1 for a GRU cell.
      dropout: chance of dropping entries of the embedding in mode 'train'.
      mode: 'train', 'eval' or 'predict'.

    Raises:
      ValueError: there is no layer.
    """
    if n_layers < 1:
        raise ValueError(f"RNNLM needs n_layers of at least 1, got {n_layers}.")
    cells = [rnn_cell(n_units=d_model) for _ in range(n_layers)]
    step = tl.Serial(
        tl.Parallel([], tl.Split(n_items=n_layers)),  # x, a state for each cell
        tl.SerialWithSideOutputs(cells),  # y, new states
        tl.Parallel([], tl.Concatenate(n_items=n_layers)),
    )
    zero_state = tl.MakeZeroState(
        depth_multiplier=n_layers * rnn_cell_d_state_multiplier
    )
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        tl.Embedding(vocab_size, d_model),
        tl.Dropout(rate=dropout, mode=mode),
        tl.Branch([], zero_state),
        tl.Scan(step, axis=1, mode=mode),
        tl.Select([0], n_in=2),  # Drops the last state.
        tl.Dense(vocab_size),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def GRULM(
    vocab_size: int = 256,
    d_model: int = 512,
    n_layers: int = 1,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a language model of GRU layers.

    Input: ids (batch, length) int in [0, vocab_size). Output: (batch, length,
    vocab_size) float logits; those at t predict id t from ids 0 to t - 1, as the model
    shifts its input right by itself.

    Args:
      vocab_size: number of ids.
      d_model: width of embedding and of each layer.
      n_layers: number of layers.
      mode: 'train', 'eval' or 'predict'.
      scan_layers: puts all layers into one `Repeat`.

    Example:
      >>> import jax.numpy as jnp
      >>> lm = GRULM(vocab_size=10, d_model=8)
      >>> ids = jnp.array([[5, 6, 7]])
      >>> _ = lm.init(ids)
      >>> lm(ids).shape
      (1, 3, 10)
    """
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        tl.Embedding(vocab_size, d_model),
        repeated(lambda: tl.GRU(d_model, mode=mode), n_layers, scan_layers),
        tl.Dense(vocab_size),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def LSTMSeq2SeqAttn(
    input_vocab_size: int = 256,
    target_vocab_size: int = 256,
    d_model: int = 512,
    n_encoder_layers: int = 2,
    n_decoder_layers: int = 2,
    n_attention_heads: int = 1,
    attention_dropout: float = 0.0,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns an LSTM encoder and decoder with attention between them.

    The decoder is an LSTM, attention from its outputs to the encoder's, and further
    LSTMs on the sum of both.

    Inputs: source ids (batch, source length) int and target ids (batch, target length)
    int; 0 is padding, which attention does not see, and belongs at the end. Outputs:
    log-probabilities (batch, target length, target_vocab_size) float, and the target
    ids once more, for the loss. Those at t predict target t from the source and targets
    0 to t - 1, as the model shifts targets right by itself.

    In mode 'predict' the first call takes (source, first target ids), and later calls
    the same source with the next ids; only the first one runs the encoder.

    Args:
      input_vocab_size: number of source ids.
      target_vocab_size: number of target ids.
      d_model: width of all layers.
      n_encoder_layers: number of LSTMs in the encoder.
      n_decoder_layers: number of LSTMs after attention.
      n_attention_heads: number of attention heads; divides d_model.
      attention_dropout: chance of an attention weight to be dropped in mode 'train'.
      mode: 'train', 'eval', 'predict' or 'viz'.
      scan_layers: puts the encoder's LSTMs into one `Repeat`, and those after attention
        into another.

    Raises:
      ValueError: sizes do not fit; says which.
    """
    encoder = tl.Serial(
        tl.Embedding(input_vocab_size, d_model),
        repeated(lambda: tl.LSTM(d_model), n_encoder_layers, scan_layers),
    )
    pre_attention_decoder = tl.Serial(
        tl.ShiftRight(mode=mode),
        tl.Embedding(target_vocab_size, d_model),
        tl.LSTM(d_model, mode=mode),
    )
    attention = tl.AttentionQKV(
        d_model,
        n_heads=n_attention_heads,
        dropout=attention_dropout,
        mode=mode,
        cache_KV_in_predict=True,
    )
    return tl.Serial(
        tl.Select([0, 1, 0, 1]),  # source, target, source, target
        tl.Parallel(
            tl.Cache(encoder, mode=mode), pre_attention_decoder, tl.PaddingMask()
        ),
        tl.Select([1, 0, 0, 2], name="PrepareAttentionInputs"),  # q, k, v, mask, target
        tl.Residual(attention),  # vectors, mask, target
        tl.Select([0, 2]),
        repeated(lambda: tl.LSTM(d_model, mode=mode), n_decoder_layers, scan_layers),
        tl.Dense(target_vocab_size),
        tl.LogSoftmax(),
    )

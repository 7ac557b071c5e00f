"""BERT: an encoder that sees both sides, its heads, and a masked language model.

Above `blocks`. Blocks normalize after each part (Devlin et al. 2018,
https://arxiv.org/abs/1810.04805), with initial weights of deviation 0.02.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin

from retrax import layers as tl
from retrax.models.blocks import repeated

__all__ = [
    "BERT",
    "BERTClassifierHead",
    "BERTMLMHead",
    "BERTPretrainingHead",
    "BERTPretrainingLoss",
    "BERTRegressionHead",
    "MaskedLM",
]


@gin.configurable(module="retrax.models", denylist=["mode"])
def BERT(
    d_model: int = 768,
    vocab_size: int = 30522,
    max_len: int = 512,
    type_vocab_size: int = 2,
    n_heads: int = 12,
    d_ff: int = 3072,
    n_layers: int = 12,
    head: Callable[[], tl.Layer] | None = None,
    mode: str = "eval",
    dropout: float = 0.1,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a BERT encoder; the default sizes are those of the base model.

    Inputs, as in Trax: ids (batch, length) int, 0 being padding, which attention does
    not see; ids of segments, alike; and a third input, such as the number of the
    example, which is dropped. Outputs: (pooled, vectors), or what `head` makes of them.
    pooled: (batch, d_model), tanh of a dense layer of the first vector; vectors:
    (batch, length, d_model).

    Args:
      d_model: width of the vectors between blocks.
      vocab_size: number of ids.
      max_len: longest sequence.
      type_vocab_size: number of ids of segments.
      n_heads: number of attention heads; divides d_model.
      d_ff: width in the middle of the feed-forward parts.
      n_layers: number of blocks.
      head: makes a layer that takes the two outputs.
      mode: 'train', 'eval' or 'viz'; 'predict' is 'eval', as nothing is decoded.
      dropout: chance of dropping in mode 'train', also for attention weights; not in
        Trax.
      scan_layers: puts all blocks into one `Repeat`.

    To start from trained weights, use `init_from_file` or `train.init_checkpoint`.
    """
    embeddings = [
        tl.Select([0, 1, 0], n_in=3),
        tl.Parallel(
            _embedding(vocab_size, d_model),
            _embedding(type_vocab_size, d_model),
            tl.PaddingMask(),
        ),
        tl.Add(),
    ]
    encoder = _encoder(
        d_model, d_ff, n_heads, n_layers, max_len, dropout, mode, scan_layers
    )
    pooler = [
        tl.Branch(tl.Fn("First", lambda x: x[:, 0]), None),
        _dense(d_model),
        tl.Tanh(),
    ]
    return tl.Serial(embeddings, encoder, pooler, None if head is None else head())


@gin.configurable(module="retrax.models", denylist=["mode"])
def MaskedLM(
    vocab_size: int,
    d_model: int = 512,
    d_ff: int = 2048,
    n_layers: int = 6,
    n_heads: int = 8,
    max_len: int = 512,
    dropout: float = 0.1,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a masked language model: BERT without segments and pooling.

    Input: ids (batch, length) int in [0, vocab_size), 0 being padding, which attention
    does not see. Output: (batch, length, vocab_size) float logits of the id at each
    place. Batches are (ids with some masked, all ids, weights 1 at masked places).

    The arguments are those of `BERT`.
    """
    encoder = _encoder(
        d_model, d_ff, n_heads, n_layers, max_len, dropout, mode, scan_layers
    )
    return tl.Serial(
        tl.Branch(_embedding(vocab_size, d_model), tl.PaddingMask()),
        encoder,
        _dense(d_model),
        tl.Gelu(),
        tl.LayerNorm(epsilon=_EPSILON),
        _dense(vocab_size),
    )


@gin.configurable(module="retrax.models")
def BERTClassifierHead(n_classes: int) -> tl.Layer:
    """Returns a head (pooled, vectors) -> (batch, n_classes) logits."""
    return tl.Serial(tl.Select([0], n_in=2), _dense(n_classes))


@gin.configurable(module="retrax.models")
def BERTRegressionHead() -> tl.Layer:
    """Returns a head (pooled, vectors) -> (batch,) numbers."""
    squeeze = tl.Fn("RemoveAxis", lambda x: x[..., 0])
    return tl.Serial(tl.Select([0], n_in=2), _dense(1), squeeze)


@gin.configurable(module="retrax.models")
def BERTMLMHead(vocab_size: int = 30522) -> tl.Layer:
    """Returns a head (pooled, vectors) -> (batch, length, vocab_size) logits."""
    return tl.Serial(tl.Select([1], n_in=2), _dense(vocab_size))


@gin.configurable(module="retrax.models")
def BERTPretrainingHead(n_classes: int = 2, vocab_size: int = 30522) -> tl.Layer:
    """Returns a head that gives the logits of both the classifier and the MLM head."""
    return tl.Branch(BERTClassifierHead(n_classes), BERTMLMHead(vocab_size))


@gin.configurable(module="retrax.models")
def BERTPretrainingLoss() -> tl.Layer:
    """Returns the sum of the losses of both parts of `BERTPretrainingHead`.

    Inputs: (class logits, logits, classes, class weights, ids, weights); output: the
    sum of two weighted cross entropies.
    """
    of_classes = [tl.Select([0, 2, 3], n_in=6), tl.WeightedCategoryCrossEntropy()]
    of_ids = [tl.Select([1, 4, 5], n_in=6), tl.WeightedCategoryCrossEntropy()]
    return tl.Serial(tl.Branch(of_classes, of_ids), tl.Add())


# --- Helpers ------------------------------------------------------------------------

_EPSILON = 1e-12


def _encoder(
    d_model: int,
    d_ff: int,
    n_heads: int,
    n_layers: int,
    max_len: int,
    dropout: float,
    mode: str,
    scan_layers: bool,
) -> list[Any]:
    """Layers (embeddings, mask) -> vectors."""
    mode = "eval" if mode == "predict" else mode

    def drop() -> tl.Layer:
        return tl.Dropout(rate=dropout, mode=mode)

    def norm() -> tl.Layer:
        return tl.LayerNorm(epsilon=_EPSILON)

    def block() -> list[tl.Layer]:
        return [
            tl.Residual(tl.Attention(d_model, n_heads, dropout, mode), drop()),
            norm(),
            tl.Residual(_dense(d_ff), tl.Gelu(), _dense(d_model), drop()),
            norm(),
        ]

    return [
        tl.PositionalEncoding(max_len, kind="learned", mode=mode),
        norm(),
        drop(),
        repeated(block, n_layers, scan_layers),
        tl.Select([0], n_in=2),  # Drops the mask.
    ]


def _dense(n_units: int) -> tl.Layer:
    return tl.Dense(n_units, kernel_initializer=tl.RandomNormalInitializer(0.02))


def _embedding(n: int, d_model: int) -> tl.Layer:
    return tl.Embedding(n, d_model, kernel_initializer=tl.RandomNormalInitializer(0.02))

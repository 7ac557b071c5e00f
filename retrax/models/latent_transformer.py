"""`LatentTransformerLM`: a language model with places for latent thoughts.

Above `blocks`, beside `transformer`. How thoughts come about, and what is made of the
outputs, is `retrax.supervised.latent`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import jax.numpy as jnp

from retrax import layers as tl
from retrax.models.blocks import TransformerBlocks, repeated

__all__ = ["LatentTransformerLM"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def LatentTransformerLM(
    side: int = 9,
    n_latents: int = 0,
    d_model: int = 512,
    d_ff: int = 2048,
    n_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    mode: str = "train",
    max_len: int | None = None,
    noise_head: bool = False,
    ff_activation: Callable[[], tl.Layer] = tl.Gelu,
    scan_layers: bool = False,
    conv_width: int = 0,
) -> tl.Layer:
    """Returns a Transformer language model of grids, with places for latent thoughts.

    The ids are those of `data.sudoku`: rows and columns 0 to side - 1, values 1 to
    side, placeholder side + 1. Nothing is shifted: logits at t predict id t + 1.

    Inputs: ids (batch, length) int; latents (batch, K, d_model) or (batch, K, 1) float;
    positions (batch, K) int; active (batch, K) bool. Where a slot is active its vector
    takes the place of the embedding at its position (`InjectLatents`). With noise_head
    also thoughts (batch, K, d_model) float.

    Outputs: logits (batch, length, side + 2); hidden (batch, length, d_model), what the
    logits are read from; cand_logits (batch, K, side * side, side), for each slot, cell
    and digit whether it is possible, read from hidden at the slots' positions. With
    noise_head also mu and log_sigma (batch, K, d_model) of the thoughts, see
    `LatentNoise`.

    With n_latents=0 it is a plain language model: K is 0, and there is no head for
    candidates.

    Args:
      side: side of the grid.
      n_latents: K, number of slots.
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward parts.
      n_layers: number of blocks.
      n_heads: number of attention heads; divides d_model.
      dropout: chance of dropping in mode 'train', also for attention weights.
      mode: 'train', 'eval', 'viz', or 'predict', which goes on after the ids of the
        calls before.
      max_len: longest sequence; None for a whole grid with its placeholders.
      noise_head: whether thoughts can be random.
      ff_activation: makes the activation layer of the feed-forward parts.
      scan_layers: puts all blocks into one `Repeat`.
      conv_width: number of embeddings, up to a token's own, that a causal convolution
        of single channels adds to it; 0 for none. With 3 the vector of a value knows
        its row and column from the start, and attention need not learn to find them.
        Short convolutions in Transformers: So et al. 2021,
        https://arxiv.org/abs/2109.08668.

    Raises:
      ValueError: sizes do not fit; says which.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> lm = LatentTransformerLM(4, n_latents=2, d_model=8, d_ff=8, n_layers=1,
      ...                          n_heads=2, mode='eval')
      >>> ids, latents = jnp.zeros((1, 49), jnp.int32), jnp.zeros((1, 2, 8))
      >>> x = (ids, latents, jnp.array([[15, 16]]), jnp.ones((1, 2), bool))
      >>> _ = lm.init(x)
      >>> [y.shape for y in lm(x)]
      [(1, 49, 6), (1, 49, 8), (1, 2, 16, 4)]
    """
    if side < 1 or n_latents < 0 or conv_width < 0:
        raise ValueError(
            "LatentTransformerLM needs side >= 1, n_latents >= 0 and conv_width >= 0, "
            f"got side={side}, n_latents={n_latents}, conv_width={conv_width}."
        )
    if noise_head and not n_latents:
        raise ValueError("noise_head=True needs n_latents of at least 1, got 0.")
    if max_len is None:
        max_len = 3 * side * side + n_latents
    blocks = TransformerBlocks(
        d_model, d_ff, n_heads, max_len, dropout, None, mode, ff_activation
    )
    neighbours = []
    if conv_width:
        neighbours = [tl.Residual(tl.CausalDepthwiseConv(conv_width, mode=mode))]
    vocab_size, shape = side + 2, (side * side, side)
    lm = tl.Serial(
        tl.Select([0, 1, 2, 3, 2]),  # ids, latents, positions, active, positions
        tl.Embedding(vocab_size, d_model),
        *neighbours,  # Of ids, not of latents, which would drown them.
        tl.InjectLatents(),
        tl.PositionalEncoding(max_len=max_len, mode=mode, kind="learned"),
        blocks.drop(),
        repeated(blocks.decoder, n_layers, scan_layers),
        tl.LayerNorm(),
        tl.Branch(
            tl.Dense(vocab_size, use_bias=False),
            None,  # The hidden vectors themselves.
            _candidates(shape) if n_latents else _no_candidates(shape),
        ),
    )
    return tl.Parallel(lm, tl.LatentNoise(n_latents, d_model)) if noise_head else lm


def _candidates(shape: tuple[int, int]) -> list[tl.Layer]:
    """Reads (cells, digits) logits from each slot: (hidden, positions) -> logits."""

    def unflatten(x: Any) -> Any:
        return jnp.reshape(x, (*x.shape[:2], *shape))

    return [
        tl.TakePositions(),
        tl.Dense(shape[0] * shape[1]),
        tl.Fn("ToCellsAndDigits", unflatten),
    ]


def _no_candidates(shape: tuple[int, int]) -> tl.Layer:
    def nothing(hidden: Any, positions: Any) -> Any:
        del positions
        return jnp.zeros((hidden.shape[0], 0, *shape), hidden.dtype)

    return tl.Fn("NoCandidates", nothing)

"""Sudoku grids as sequences of tokens, and instances of what is possible.

Above `sudoku_draws`, under `sudoku_dataset`. A grid becomes triples (row, column,
value): first the clues, then K placeholders for latent thoughts, then the other cells
in some order. Rows and columns are 0 to n - 1, values 1 to n, and n + 1 is the
placeholder, so there are n + 2 ids.
"""

import numpy as np

from retrax.data.streams import Batch
from retrax.data.sudoku_draws import Draws

__all__ = ["drawn_digits", "instance_tokens", "tokens_of"]


def tokens_of(
    values: np.ndarray, order: np.ndarray, n_clues: np.ndarray, n_latents: int
) -> np.ndarray:
    """Writes grids as triples in order, with placeholders after the clues."""
    n_rows, cells = values.shape
    n = int(cells**0.5)
    triples = np.stack(
        [order // n, order % n, np.take_along_axis(values, order, 1)], axis=2
    ).reshape(n_rows, -1)
    tokens = np.full((n_rows, 3 * cells + n_latents), n + 1, np.int32)
    at = np.arange(3 * cells)
    np.put_along_axis(tokens, at + n_latents * (at >= 3 * n_clues), triples, axis=1)
    return tokens


def drawn_digits(masks: np.ndarray, draws: Draws) -> np.ndarray:
    """Draws a digit of each mask; anything where a mask is 0."""
    n = int(masks.shape[-1] ** 0.5)
    bits = masks[..., None] >> np.arange(n) & 1
    return np.where(bits, draws.random(bits.shape), -1).argmax(-1) + 1


def instance_tokens(batch: Batch, stage: int, draws: Draws) -> np.ndarray:
    """Returns the tokens of a batch with other values for empty cells.

    Args:
      batch: of `SudokuDataset`.
      stage: each value is drawn from the candidates at this stage, uniformly and
        independently.
      draws: where the random numbers come from.

    Raises:
      ValueError: the batch has no candidates of that stage.
    """
    tokens, solution, start_index, _, candidates = batch[:5]
    n_latents, cells = candidates.shape[1:]
    if not 0 <= stage < n_latents:
        raise ValueError(
            f"stage={stage} is beyond the last: the batches hold candidates of "
            f"n_latents={n_latents} stages, 0 to {n_latents - 1}."
        )
    n = int(cells**0.5)
    masks = candidates[:, stage]
    values = np.where(masks > 0, drawn_digits(masks, draws), solution)
    at = np.arange(tokens.shape[1])
    base = 3 * start_index + n_latents
    is_value = (at >= base) & ((at - base) % 3 == 2)
    row, column = np.roll(tokens, 2, axis=1), np.roll(tokens, 1, axis=1)
    cell = np.where(is_value, row * n + column, 0)
    drawn = np.take_along_axis(values, cell, axis=1)
    return np.where(is_value, drawn, tokens).astype(tokens.dtype)

"""From a model with latent thoughts to a filled-in grid: greedy and beam decoding.

Above `cached_model` and `beam`, under `latent_evaluation`. Thoughts are built once;
then the model, made with mode='predict', sees each token once, in one compiled loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from retrax import layers as tl
from retrax.supervised import cached_model
from retrax.supervised.beam import Axes, batch_axes, take_rows
from retrax.supervised.latent import Latents

__all__ = ["Graded", "decode", "grade"]


def decode(
    model: tl.Layer,
    weights: Any,
    tokens: Any,
    start_index: Any,
    latents: Latents,
    n_beams: int = 1,
    give_first: bool = False,
) -> Any:
    """Completes sequences by the most probable tokens. To be compiled.

    Args:
      model: `LatentTransformerLM` of mode 'predict' without its noise head.
      weights: its weights.
      tokens: (batch, length) int; of each row the clues and placeholders are used, and
        what comes after them is not.
      start_index: (batch,) or (batch, 1) int, number of clues.
      latents: thoughts.
      n_beams: width of beam search; 1 takes the best token each time.
      give_first: the first token after the placeholders is used, too: for models that
        are not trained to predict it (`LatentConfig.supervise_first`).

    Returns:
      (batch, length) int32; of several beams the most probable one.
    """
    # `cached_model` feeds the tokens last.
    ordered = tl.Serial(tl.Select([3, 0, 1, 2]), model)
    values, positions, active = (jnp.asarray(x) for x in latents[:3])
    tokens = jnp.asarray(tokens, jnp.int32)
    base = 3 * jnp.reshape(jnp.asarray(start_index), (-1, 1)) + positions.shape[1]
    axes: Axes = []
    if n_beams > 1:
        inputs = (values, positions, active)
        axes = batch_axes(ordered, ((), weights), (), tokens[:, :1], inputs)
    return _decoded(
        ordered,
        ((), weights),
        tokens,
        base + int(give_first),
        tuple(jnp.repeat(x, n_beams, axis=0) for x in (values, positions, active)),
        n_beams,
        axes,
    )


def _decoded(
    model: tl.Layer,
    weights: Any,
    tokens: Any,
    base: Any,
    inputs: tuple[Any, ...],
    n_beams: int,
    axes: Axes,
) -> Any:
    n_rows, length = tokens.shape
    values, positions, active = inputs
    beams = jnp.arange(n_beams)
    ids = jnp.repeat(tokens[:, :1], n_beams, axis=0)
    state = cached_model.start_state(model, (), ids, inputs)
    out = jnp.repeat(tokens[:, None], n_beams, axis=1)
    # All beams are alike at first; the first one alone counts.
    log_p = jnp.where(beams == 0, 0.0, -jnp.inf) * jnp.ones((n_rows, 1))

    def one_more(loop: Any, t: Any) -> tuple[Any, None]:
        out, log_p, state = loop
        ids = jax.lax.dynamic_index_in_dim(out, t, axis=2).reshape(-1, 1)
        seen = (values, positions - t, active)
        logits, state = cached_model.run(model, weights, state, ids, seen, None)
        more = jax.nn.log_softmax(logits[:, -1]).reshape(n_rows, n_beams, -1)
        n_vocab = more.shape[-1]
        total = (log_p[:, :, None] + more).reshape(n_rows, -1)
        best, place = jax.lax.top_k(total, n_beams)
        free = t + 1 >= base
        origin = jnp.where(free, place // n_vocab, beams)
        given = jax.lax.dynamic_index_in_dim(tokens, t + 1, axis=1)
        token = jnp.where(free, place % n_vocab, given)
        log_p = jnp.where(free, best, log_p)
        out = jnp.take_along_axis(out, origin[:, :, None], axis=1)
        out = jax.lax.dynamic_update_slice(out, token[:, :, None], (0, 0, t + 1))
        if n_beams > 1:
            rows = jnp.arange(n_rows)[:, None] * n_beams + origin
            state = take_rows(state, axes, rows.ravel())
        return (out, log_p, state), None

    (out, _, _), _ = jax.lax.scan(one_more, (out, log_p, state), jnp.arange(length - 1))
    return out[:, 0]


class Graded(NamedTuple):
    """How well grids were filled in.

    Attributes:
      right: (batch, cells) bool: empty cells that were given the right value.
      empty: (batch, cells) bool: cells that are no clues.
      solved: (batch,) bool: every empty cell came exactly once, with the right value.
    """

    right: np.ndarray
    empty: np.ndarray
    solved: np.ndarray

    @property
    def cell_accuracy(self) -> float:
        """Share of the empty cells that were given the right value."""
        return float(self.right.sum() / max(self.empty.sum(), 1))


def grade(tokens: Any, solution: Any, start_index: Any, n_latents: int) -> Graded:
    """Compares decoded sequences with solutions.

    A triple counts if its row and column are in the grid, the cell is no clue, and the
    value is right. A cell that comes twice has taken another one's place, so such a
    puzzle is not solved.

    Args:
      tokens: (batch, 3 cells + n_latents) int.
      solution: (batch, cells) int.
      start_index: (batch,) or (batch, 1) int, number of clues.
      n_latents: K.
    """
    tokens, solution = np.asarray(tokens), np.asarray(solution)
    n_rows, cells = solution.shape
    n = round(cells**0.5)
    triple = np.arange(cells)
    is_clue = triple < np.reshape(start_index, (-1, 1))
    at = 3 * triple + np.where(is_clue, 0, n_latents)
    row, column, value = (np.take_along_axis(tokens, at + i, axis=1) for i in range(3))
    inside = (row < n) & (column < n)
    cell = np.where(inside, row * n + column, 0)
    rows = np.broadcast_to(np.arange(n_rows)[:, None], cell.shape)
    empty = np.ones((n_rows, cells), bool)
    empty[rows[is_clue], cell[is_clue]] = False
    hit = ~is_clue & inside & (np.take_along_axis(solution, cell, axis=1) == value)
    right = np.zeros((n_rows, cells), bool)
    right[rows[hit], cell[hit]] = True
    right &= empty
    return Graded(right, empty, (right == empty).all(axis=1))

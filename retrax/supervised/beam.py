"""Beam search over a cached model, as one compiled loop.

Above `cached_model`, under `decoding`, which has the public function. Hypotheses of a
batch lie in the model's batch axis one after another: row r, beam k at r * n_beams + k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from retrax.layers.base import Layer
from retrax.supervised.cached_model import run, start_state
from retrax.supervised.sampling import PAD_ID, ban_eos

__all__ = ["Axes", "batch_axes", "beam_loop", "length_penalty", "take_rows"]

# (axis, its size per row) of each leaf of a state; None for what all rows share.
Axes = list[tuple[int, int] | None]


class _Beams(NamedTuple):
    """Hypotheses of all rows; -inf is the score of a place that holds none.

    Attributes:
      ids, log_p: (batch, n_beams, max_length) int32 and (batch, n_beams) of those that
        go on.
      ended_ids, ended_lengths, scores: the same of the best that have ended, with the
        number of their tokens; scores are divided by the length penalty.
      done: (batch,) bool, rows that look for no more.
    """

    ids: Any
    log_p: Any
    ended_ids: Any
    ended_lengths: Any
    scores: Any
    done: Any


def beam_loop(
    model: Layer,
    n_beams: int,
    max_length: int,
    axes: Axes,
    weights: Any,
    state: Any,
    ids: Any,
    inputs: tuple[Any, ...],
    rng: Any,
    values: dict[str, Any],
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Searches; `decoding.beam_search` says by which rule.

    Args:
      axes: what `batch_axes` found.
      state: that before the first token.
      values: scalars 'eos_id', 'min_length' and 'alpha'.

    Returns:
      (ids: (batch, n_beams, max_length) int32, lengths: (batch, n_beams) int32, scores:
      (batch, n_beams) float, number of steps, whether the last gave NaN, the state).
    """
    n_rows = ids.shape[0]

    def look(beams: _Beams, logits: Any, t: Any) -> tuple[_Beams, Any, Any]:
        """Extends all hypotheses by one token; tells from which each stems."""
        broken = jnp.any(jnp.isnan(logits), axis=(1, 2)) & ~beams.done
        log_p = ban_eos(jax.nn.log_softmax(logits, axis=-1), t, values)
        new, origin = _extended(beams, log_p, t, n_beams, values)
        return new, origin, jnp.any(broken)

    def unfinished(loop: Any) -> Any:
        t, beams, failed, _ = loop
        return (t < max_length) & ~jnp.all(beams.done) & ~failed

    def one_more(loop: Any) -> Any:
        t, beams, _, state = loop
        tokens = jax.lax.dynamic_index_in_dim(beams.ids, t - 1, axis=2)
        tokens = jnp.reshape(tokens, (n_rows * n_beams, 1))
        key = jax.random.fold_in(rng, t)
        logits, state = run(model, weights, state, tokens, all_inputs, key)
        logits = jnp.reshape(logits[:, -1], (n_rows, n_beams, -1))
        beams, origin, failed = look(beams, logits, t)
        rows = jnp.arange(n_rows)[:, None] * n_beams + origin
        return t + 1, beams, failed, take_rows(state, axes, jnp.ravel(rows))

    logits, state = run(model, weights, state, ids, inputs, jax.random.fold_in(rng, 0))
    copies = jnp.repeat(jnp.arange(n_rows), n_beams)
    state = take_rows(state, axes, copies)
    all_inputs = tuple(x[copies] for x in inputs)
    first = _empty(n_rows, n_beams, max_length, logits.dtype)
    logits = jnp.repeat(logits[:, -1:], n_beams, axis=1)
    beams, _, failed = look(first, logits, jnp.int32(0))
    loop = (jnp.int32(1), beams, failed, state)
    t, beams, failed, state = jax.lax.while_loop(unfinished, one_more, loop)
    return *_best(beams, t, n_beams, values["alpha"]), t, failed, state


def length_penalty(length: Any, alpha: Any) -> Any:
    """Returns ((5 + length) / 6) ** alpha.

    Wu et al. 2016, https://arxiv.org/abs/1609.08144, equation 14.
    """
    return ((5.0 + length) / 6.0) ** alpha


def _empty(n_rows: int, n_beams: int, max_length: int, dtype: Any) -> _Beams:
    """One hypothesis without tokens in each row."""
    ids = jnp.full((n_rows, n_beams, max_length), PAD_ID, jnp.int32)
    nobody = jnp.full((n_rows, n_beams), -jnp.inf, dtype)
    return _Beams(
        ids=ids,
        log_p=nobody.at[:, 0].set(0.0),
        ended_ids=ids,
        ended_lengths=jnp.zeros((n_rows, n_beams), jnp.int32),
        scores=nobody,
        done=jnp.zeros(n_rows, bool),
    )


def _extended(
    old: _Beams, log_p: Any, t: Any, n_beams: int, values: dict[str, Any]
) -> tuple[_Beams, Any]:
    """Returns all hypotheses with one more token, and the old place of each.

    Of the best extensions those that end count if they are among the first n_beams,
    and the first n_beams that do not end go on; for both, twice as many are enough.
    """
    n_rows, _, n_vocab = log_p.shape
    total = jnp.reshape(old.log_p[:, :, None] + log_p, (n_rows, -1))
    total, place = jax.lax.top_k(total, min(2 * n_beams, total.shape[1]))
    origin, token = place // n_vocab, (place % n_vocab).astype(jnp.int32)
    ends = token == values["eos_id"]
    ids = jnp.take_along_axis(old.ids, origin[:, :, None], axis=1)
    ids = jax.lax.dynamic_update_slice(ids, token[:, :, None], (0, 0, t))

    penalty = length_penalty(t + 1, values["alpha"])
    new_scores = jnp.where(ends, total / penalty, -jnp.inf)[:, :n_beams]
    lengths = jnp.broadcast_to(t + 1, new_scores.shape)
    ended_ids, ended_lengths, scores = _keep_best(
        n_beams,
        (old.ended_ids, ids[:, :n_beams]),
        (old.ended_lengths, lengths),
        (old.scores, new_scores),
    )
    log_p, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, total), n_beams)
    n_ended = jnp.sum(scores > -jnp.inf, axis=1)
    new = _Beams(
        ids=jnp.take_along_axis(ids, chosen[:, :, None], axis=1),
        log_p=log_p,
        ended_ids=ended_ids,
        ended_lengths=ended_lengths,
        scores=scores,
        done=old.done | (n_ended >= n_beams) | (log_p[:, 0] == -jnp.inf),
    )
    origin = jnp.take_along_axis(origin, chosen, axis=1)
    return _unless(old.done, new, old), origin


def _best(beams: _Beams, t: Any, n_beams: int, alpha: Any) -> tuple[Any, Any, Any]:
    """The best that ended or, in rows that were not done, reached the last length."""
    open_scores = beams.log_p / length_penalty(t, alpha)
    open_scores = jnp.where(beams.done[:, None], -jnp.inf, open_scores)
    ids, lengths, scores = _keep_best(
        n_beams,
        (beams.ended_ids, beams.ids),
        (beams.ended_lengths, jnp.broadcast_to(t, open_scores.shape)),
        (beams.scores, open_scores),
    )
    found = scores > -jnp.inf
    lengths = jnp.where(found, lengths, 0)
    return jnp.where(found[:, :, None], ids, PAD_ID), lengths, scores


def _keep_best(n_beams: int, ids: Any, lengths: Any, scores: Any) -> Any:
    """Joins pairs of (ids, lengths, scores) along the beams and keeps the best."""
    scores, best = jax.lax.top_k(jnp.concatenate(scores, axis=1), n_beams)
    ids = jnp.take_along_axis(jnp.concatenate(ids, axis=1), best[:, :, None], axis=1)
    lengths = jnp.take_along_axis(jnp.concatenate(lengths, axis=1), best, axis=1)
    return ids, lengths, scores


def _unless(done: Any, new: _Beams, old: _Beams) -> _Beams:
    """Leaves rows that are done as they are."""

    def pick(a: Any, b: Any) -> Any:
        return jnp.where(jnp.reshape(done, (-1,) + (1,) * (a.ndim - 1)), b, a)

    return jax.tree.map(pick, new, old)


# --- The batch axis of the state ----------------------------------------------------


def batch_axes(
    model: Layer, weights: Any, state: Any, ids: Any, inputs: tuple[Any, ...]
) -> Axes:
    """Finds the batch axis of each leaf of the state after the prompt.

    A state says nothing of its axes, so this compares its shapes for two batch sizes.

    Returns:
      (axis, its size per row) in flattening order; None for what all rows share.

    Raises:
      ValueError: a leaf depends on the batch size in another way.
    """
    n_rows = ids.shape[0]

    def shapes(n: int) -> list[Any]:
        some, *inputs_of_n = (
            jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for x in (ids, *inputs)
        )

        def after(ids: Any, inputs: tuple[Any, ...]) -> Any:
            start = start_state(model, state, ids, inputs)
            return run(model, weights, start, ids, inputs, jax.random.key(0))[1]

        return jax.tree.leaves(jax.eval_shape(after, some, tuple(inputs_of_n)))

    axes: Axes = []
    for a, b in zip(shapes(n_rows), shapes(n_rows + 1), strict=True):
        sizes = list(zip(a.shape, b.shape, strict=True))
        differ = [i for i, (x, y) in enumerate(sizes) if x != y]
        if not differ:
            axes.append(None)
            continue
        axis, per_row = differ[0], a.shape[differ[0]] // n_rows
        if len(differ) > 1 or sizes[axis] != (n_rows * per_row, (n_rows + 1) * per_row):
            raise ValueError(
                f"beam search cannot tell which part of the state of {model.name} "
                f"belongs to which row: an array in it has shape {a.shape} for "
                f"{n_rows} rows and {b.shape} for {n_rows + 1}."
            )
        axes.append((axis, per_row))
    return axes


def take_rows(state: Any, axes: Axes, rows: Any) -> Any:
    """Returns the state whose row i is what row rows[i] was."""
    leaves, treedef = jax.tree.flatten(state)
    taken = []
    for leaf, place in zip(leaves, axes, strict=True):
        if place is None:
            taken.append(leaf)
            continue
        axis, per_row = place
        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
        leaf = jnp.reshape(leaf, (*before, -1, per_row, *after))
        leaf = jnp.take(leaf, rows, axis=axis)
        taken.append(jnp.reshape(leaf, (*before, len(rows) * per_row, *after)))
    return treedef.unflatten(taken)

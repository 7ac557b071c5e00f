"""Thoughts and answer in one run of a model that keeps keys and values.

Above `latent` and `cached_model`, under `latent_layers`. `build_latents` runs the model
anew for each thought, although nothing before a thought depends on it. A causal model
of mode 'predict' sees each token once instead: it takes at once what is a clue in every
row, then position after position, each vector becoming the next input where there is a
slot, and at once what is a solution in every row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from retrax import layers as tl
from retrax.supervised import cached_model
from retrax.supervised.latent import Latents, active_slots, slot_positions
from retrax.supervised.latent_config import LatentConfig

__all__ = ["think_and_answer"]

# A loop copies all keys and values in each turn, and more code takes longer to compile.
_MOST_UNROLLED = 10


def think_and_answer(
    model: tl.Layer,
    weights: Any,
    ids: Any,
    start_index: Any,
    levels: Any,
    n_latents: int,
    config: LatentConfig,
) -> tuple[Latents, Any, Any]:
    """Builds thoughts and reads out, as `build_latents` and one more run would.

    Values and gradients are those, but for rounding; with `config.trunc`, too. A row
    with clues beyond `config.shared_prefix` and `config.prefix_length` has logits of
    NaN. To be compiled.

    Args:
      model: `LatentTransformerLM` of mode 'predict' without its noise head.
      weights: its weights.
      ids: (batch, length) int.
      start_index: (batch,) or (batch, 1) int, number of clues s.
      levels: (batch,) or (batch, 1) int.
      n_latents: K, number of slots, at least 1.
      config: `num_passes`, `mode`, `trunc`, `shared_prefix` and `prefix_length` are
        heeded.

    Returns:
      (thoughts, logits: (batch, length, vocab), cand_logits: (batch, K, C, n)).
    """
    n_rows, length = ids.shape
    passes = config.passes(n_latents)
    first = config.shared_prefix or 1
    last = min(config.prefix_length or length, length)
    positions = slot_positions(start_index, n_latents)
    full = active_slots(levels, n_latents, passes, config.mode)
    ordered = tl.Serial(tl.Select([3, 0, 1, 2]), model)  # `start_state` has ids last.

    def run(state: Any, ids: Any, *slots: Any) -> Any:
        return ordered.pure_fn((*slots, ids), ((), weights), state, None)

    def at_once(state: Any, ids: Any) -> Any:
        return run(state, ids, *_slots(n_rows, 0))

    def next_one(loop: Any, x: Any) -> Any:
        state, before = loop
        at, ids = x
        slot = at - positions[:, 0]
        is_slot = slot == jnp.arange(n_latents)[:, None]  # (K, batch)
        active = jnp.any(is_slot & full.T, axis=0)
        z = jnp.where((slot < passes)[:, None], before, 0)
        if config.trunc:
            cut = (slot < passes - config.trunc)[:, None]
            z = jnp.where(cut, jax.lax.stop_gradient(z), z)
        slots = (z[:, None], jnp.zeros((n_rows, 1), jnp.int32), active[:, None])
        (logits, hidden, cand), state = run(state, ids[:, None], *slots)
        return (state, hidden[:, 0]), (logits[:, 0], hidden[:, 0], cand[:, 0])

    state = cached_model.start_state(ordered, (), ids[:, :1], _slots(n_rows, 1))
    (logits, hidden, _), state = at_once(state, ids[:, :first])
    steps = (jnp.arange(first, last), ids[:, first:last].T)
    unroll = last - first <= _MOST_UNROLLED
    (state, _), found = jax.lax.scan(
        next_one, (state, hidden[:, -1]), steps, unroll=unroll
    )
    more_logits, more_hidden, cand = (jnp.swapaxes(x, 0, 1) for x in found)
    logits = [logits, more_logits]
    if last < length:
        logits.append(at_once(state, ids[:, last:])[0][0])
    hidden = jnp.concatenate([hidden, more_hidden], axis=1)
    values = _taken(hidden, positions - 1)
    values = jnp.where((jnp.arange(n_latents) < passes)[:, None], values, 0)
    fits = (positions[:, :1] >= first) & (positions[:, -1:] < last)
    return (
        Latents(values, positions, full, jnp.float32(0.0)),
        jnp.where(fits[..., None], jnp.concatenate(logits, axis=1), jnp.nan),
        _taken(cand, positions - first),
    )


def _slots(n_rows: int, n: int) -> tuple[Any, Any, Any]:
    """Returns n slots that are not used: (values, positions, active)."""
    where = jnp.zeros((n_rows, n), jnp.int32)
    return jnp.zeros((n_rows, n, 1)), where, where != 0


def _taken(x: Any, positions: Any) -> Any:
    """Returns (batch, K, ...) of x (batch, length, ...) at positions (batch, K)."""
    positions = positions.reshape(*positions.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, positions, axis=1, mode="clip")

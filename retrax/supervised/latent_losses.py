"""What a model with latent thoughts is trained on: `loss_terms`.

Above `latent`, under `latent_layers`. Pure functions of arrays. A batch is that of
`data.SudokuDataset`: three tokens for each of s clues, K placeholders, then three
tokens (row, column, value) for each of the other cells; n digits, C = n * n cells.

Sums and counts are kept apart (`loss_sums`), so that devices which each hold a part of
the batch can join them exactly (`joined`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from retrax.supervised.latent import active_slots
from retrax.supervised.latent_config import LatentConfig

__all__ = [
    "LossSums",
    "candidates_at",
    "gate_terms",
    "joined",
    "leaks",
    "loss_sums",
    "loss_terms",
    "read_candidates",
    "solution_tokens",
]

_LEAST = 1e-30  # Of a probability whose logarithm is taken.


class LossSums(NamedTuple):
    """Sums over the rows of a batch, and what to divide them by.

    Attributes:
      ce: (draws,) float, weighted cross-entropies.
      n_tokens: () float, supervised tokens, each counted once whatever it weighs.
      leak: () float, log-probabilities lost to values that are not possible.
      n_values: () float, supervised values with candidates.
      aux: () float, losses of the candidate head over selected slots.
      n_slots: () float, selected slots.
      active: (batch, K) bool.
      bce_per_slot: (batch, K) float; None if it is not computed.
    """

    ce: Any
    n_tokens: Any
    leak: Any
    n_values: Any
    aux: Any
    n_slots: Any
    active: Any
    bce_per_slot: Any


def loss_terms(
    tokens: Any,
    start_index: Any,
    levels: Any,
    cand_targets: Any,
    logits: Any,
    cand_logits: Any,
    **config: Any,
) -> dict[str, Any]:
    """Computes the loss of a batch, with all of its terms.

    Args:
      tokens: (batch, length + 1) int; position i predicts token i + 1.
      start_index: (batch,) or (batch, 1) int, number of clues s.
      levels: (batch,) or (batch, 1) int.
      cand_targets: (batch, K, C) int32, bit d - 1 is set where digit d is possible; 0
        at clues.
      logits: (draws, batch, length, vocab) float.
      cand_logits: (draws, batch, K, C, n) float.
      **config: settings of `LatentConfig`.

    Returns:
      'total', 'ce_loss', 'leak_loss' and 'aux_loss' () float32; 'per_draw_ce' (draws,);
      'supervised_tokens' and 'leak_tokens' () float32; 'active' (batch, K) bool; and
      unless aux_weight is 0 'bce_per_slot' (batch, K).

    Raises:
      ConfigError: a setting is out of range, or needs slots that there are not.
    """
    settings = LatentConfig(**config)
    sums = loss_sums(
        tokens, start_index, levels, cand_targets, logits, cand_logits, settings
    )
    terms = joined(sums, settings)
    terms["per_draw_ce"] = sums.ce / jnp.maximum(sums.n_tokens, 1)
    terms |= {"supervised_tokens": sums.n_tokens, "leak_tokens": sums.n_values}
    terms["active"] = sums.active
    if sums.bce_per_slot is not None:
        terms["bce_per_slot"] = sums.bce_per_slot
    return terms


def joined(
    sums: LossSums,
    config: LatentConfig,
    over_devices: Callable[[Any], Any] = lambda x: x,
) -> dict[str, Any]:
    """Returns 'total', 'ce_loss', 'leak_loss' and 'aux_loss' from sums.

    Args:
      sums: of `loss_sums`.
      config: its settings.
      over_devices: adds a number up over all devices that hold a part of the batch.
        Results are then the parts of this device: their sums over the devices are the
        values for the whole batch.
    """
    total_of = over_devices
    per_draw = sums.ce / jnp.maximum(total_of(sums.n_tokens), 1)
    if config.noise and config.objective == "min":
        best = jnp.argmin(jax.lax.stop_gradient(total_of(per_draw)))
        ce = per_draw[best]
    else:
        ce = jnp.mean(per_draw)
    leak = sums.leak / jnp.maximum(total_of(sums.n_values), 1)
    aux = sums.aux / jnp.maximum(total_of(sums.n_slots), 1)
    if config.backtrack and config.aux_weight != 0:
        total = config.aux_weight * aux
    else:
        total = ce + config.leak_weight * leak + config.aux_weight * aux
    return {"total": total, "ce_loss": ce, "leak_loss": leak, "aux_loss": aux}


def loss_sums(
    tokens: Any,
    start_index: Any,
    levels: Any,
    cand_targets: Any,
    logits: Any,
    cand_logits: Any,
    config: LatentConfig,
    row_mask: Any = None,
) -> LossSums:
    """Computes what `loss_terms` is made of; see there for the arguments.

    Args:
      config: settings.
      row_mask: (batch,) float, 0 for rows that are padding; None for none.
    """
    n_latents = cand_targets.shape[1]
    passes = config.passes(n_latents)
    logits = logits.astype(jnp.float32)
    rows = jnp.ones(tokens.shape[0]) if row_mask is None else row_mask
    supervised, is_value = solution_tokens(
        tokens, start_index, n_latents, config.supervise_first
    )
    supervised = supervised * rows[:, None]
    weights = jnp.where(is_value, config.value_weight, config.loc_weight)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    labels = jnp.broadcast_to(tokens[:, 1:], logits.shape[:-1])
    ce = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    leak = n_values = jnp.float32(0)
    if config.leak_weight > 0:
        slot = config.inst_slot if config.inst_slot >= 0 else passes - 1
        sets = candidates_at(tokens, cand_targets[:, min(max(slot, 0), n_latents - 1)])
        counted = supervised * is_value * (sets != 0)
        n_digits = cand_logits.shape[-1]
        lost = leaks(jnp.mean(logits, axis=0), sets, n_digits)
        leak, n_values = jnp.sum(lost * counted), jnp.sum(counted)
    active = active_slots(levels, n_latents, passes, config.mode)
    aux = n_slots = jnp.float32(0)
    bce = None
    if config.aux_weight != 0:
        bce = _slot_losses(cand_targets, jnp.mean(cand_logits, axis=0), config)
        chosen = active
        if config.backtrack:
            n_active = jnp.sum(active, axis=1, keepdims=True)
            chosen = jnp.arange(n_latents) == n_active - 1
        chosen = chosen * rows[:, None]
        aux, n_slots = jnp.sum(bce * chosen), jnp.sum(chosen)
    return LossSums(
        ce=jnp.sum(ce * (supervised * weights), axis=(1, 2)),
        n_tokens=jnp.sum(supervised),
        leak=leak,
        n_values=n_values,
        aux=aux,
        n_slots=n_slots,
        active=active,
        bce_per_slot=bce,
    )


def solution_tokens(
    tokens: Any, start_index: Any, n_latents: int, supervise_first: bool = False
) -> tuple[Any, Any]:
    """Returns which positions predict a token of the solution, and which a value.

    Args:
      tokens: (batch, length + 1) int.
      start_index: (batch,) or (batch, 1) int.
      n_latents: K.
      supervise_first: whether the first token of the solution counts.

    Returns:
      (supervised, is_value): (batch, length) bool; is_value says nothing before the
      solution.
    """
    at = jnp.arange(tokens.shape[1] - 1)
    base = 3 * jnp.reshape(start_index, (-1, 1)) + n_latents
    supervised = at >= base - int(supervise_first)
    return supervised, jnp.mod(at + 1 - base, 3) == 2


def candidates_at(tokens: Any, masks: Any) -> Any:
    """Returns (batch, length) int32: candidates of the cell that a position fills in.

    Only where a value is predicted the two tokens before are a cell.

    Args:
      tokens: (batch, length + 1) int.
      masks: (batch, C) int.
    """
    n_cells = masks.shape[1]
    column = tokens[:, :-1]
    row = jnp.pad(column, ((0, 0), (1, 0)))[:, :-1]
    cell = jnp.clip(row * round(n_cells**0.5) + column, 0, n_cells - 1)
    return jnp.take_along_axis(masks, cell, axis=1)


def read_candidates(cand_logits: Any, pos_weight: float) -> Any:
    """Returns which digits the candidate head holds for more likely than not, bool.

    With possible digits weighed by w the loss is least at log(w p / (1 - p)), so a
    probability of p = 1/2 is a logit of log w, not 0.

    Args:
      cand_logits: logits, of any shape.
      pos_weight: w, as in `LatentConfig`.
    """
    return cand_logits > jnp.log(pos_weight)


def leaks(logits: Any, masks: Any, n_digits: int) -> Any:
    """Returns -log of the probability that falls on candidates: (...) float32.

    Args:
      logits: (..., vocab) float; digit d has id d.
      masks: (...) int, candidates.
      n_digits: number of digits.
    """
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    possible = masks[..., None] >> jnp.arange(n_digits) & 1
    inside = jnp.exp(logits[..., 1 : n_digits + 1]) * possible
    inside = jnp.maximum(jnp.sum(inside, axis=-1), _LEAST)
    return jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - jnp.log(inside)


def gate_terms(logits: Any, masks: Any, n_digits: int) -> dict[str, Any]:
    """Returns how far predictions are from uniform ones on the candidates.

    With q uniform on the candidates S and p the prediction, CE(q, p) = -log p(S) +
    log |S| + KL(q, p restricted to S); all parts are at least 0.

    Args:
      logits: (..., vocab) float; digit d has id d.
      masks: (...) int, candidates.
      n_digits: number of digits.

    Returns:
      'ce', 'log_size', 'leak' and 'shape_kl', (...) float32 in nats; 0 where there are
      no candidates.
    """
    possible = masks[..., None] >> jnp.arange(n_digits) & 1
    size = jnp.maximum(jnp.sum(possible, axis=-1), 1)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    ce = -jnp.sum(log_p[..., 1 : n_digits + 1] * possible, axis=-1) / size
    log_size = jnp.log(size.astype(jnp.float32))
    leak = jnp.where(masks != 0, leaks(logits, masks, n_digits), 0.0)
    shape_kl = ce - log_size - leak
    return {"ce": ce, "log_size": log_size, "leak": leak, "shape_kl": shape_kl}


def _slot_losses(cand_targets: Any, x: Any, config: LatentConfig) -> Any:
    """Binary cross-entropies of candidates, (batch, K)."""
    x = x.astype(jnp.float32)
    y = (cand_targets[..., None] >> jnp.arange(x.shape[-1]) & 1).astype(jnp.float32)
    hit, miss = jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)
    bce = -jnp.mean(config.pos_weight * y * hit + (1 - y) * miss, axis=-1)
    before = jnp.roll(cand_targets, 1, axis=1)
    first = jnp.arange(cand_targets.shape[1])[:, None] == 0
    changed = first | (cand_targets != before)
    weights = (cand_targets != 0) * jnp.where(changed, 1.0, config.delta_bg)
    total = jnp.maximum(jnp.sum(weights, axis=-1), 1e-6)
    return jnp.sum(weights * bce, axis=-1) / total

"""Latent thoughts: vectors that a model makes of itself before it answers.

Above `latent_config`, under `latent_layers`. Pure functions, called while tracing. The
hidden vector before a placeholder becomes the input at the placeholder, one slot after
the other, as in Coconut (Hao et al. 2024, https://arxiv.org/abs/2412.06769).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from retrax.supervised.latent_config import LatentConfig

__all__ = ["Latents", "active_slots", "build_latents", "slot_positions"]

_LOG_SIGMA_RANGE = (-12.0, 2.0)

# (latents, positions, active, key) -> hidden: (batch, length, d)
Forward = Callable[[Any, Any, Any, Any], Any]


class Latents(NamedTuple):
    """Thoughts and where they go: what a last run of the model reads out.

    Attributes:
      values: (batch, K, d) float; (batch, K, 1) zeros without a pass and `d_latent`.
      positions: (batch, K) int32.
      active: (batch, K) bool.
      sigma: () float32, mean deviation of the noise in the last pass, 0 without.
    """

    values: Any
    positions: Any
    active: Any
    sigma: Any


def slot_positions(start_index: Any, n_latents: int) -> Any:
    """Returns (batch, K) int32: 3 s + k, right after s clues of three tokens.

    Args:
      start_index: (batch,) or (batch, 1) int, number of clues.
      n_latents: K.
    """
    first = 3 * jnp.reshape(start_index, (-1, 1))
    return (first + jnp.arange(n_latents)).astype(jnp.int32)


def active_slots(levels: Any, n_latents: int, num_passes: int, mode: str) -> Any:
    """Returns (batch, K) bool: which slots of a row may be used.

    Args:
      levels: (batch,) or (batch, 1) int.
      n_latents: K.
      num_passes: passes that are made.
      mode: 'level': the first min(max(level - 2, 1), K); 'depth': the first
        max(min(num_passes, K), 1).
    """
    levels = jnp.reshape(levels, (-1, 1))
    if mode == "depth":
        n_active = jnp.full_like(levels, max(min(num_passes, n_latents), 1))
    else:
        n_active = jnp.clip(levels - 2, 1, max(n_latents, 1))
    return jnp.arange(n_latents) < n_active


def build_latents(
    forward: Forward,
    start_index: Any,
    levels: Any,
    n_latents: int,
    config: LatentConfig,
    rng: Any = None,
    noise_head: Callable[[Any, int], tuple[Any, Any]] | None = None,
    eps: Any = None,
    d_latent: int | None = None,
    map_thought: Callable[[Any, int], Any] | None = None,
) -> Latents:
    """Builds thoughts by runs of a model, each seeing the thoughts before its own.

    Pass j runs with the active slots before j, and its hidden vector at position
    3 s - 1 + j becomes thought j of every row. Gradients go back through all passes, or
    through the last `config.trunc`; the values do not depend on that.

    Args:
      forward: function of (latents, positions, active, key) that returns hidden vectors
        (batch, length, d). A row longer than that has thoughts of NaN.
      start_index: (batch,) or (batch, 1) int, number of clues s.
      levels: (batch,) or (batch, 1) int.
      n_latents: K, number of slots.
      config: `num_passes`, `mode`, `trunc` and `noise` are heeded.
      rng: key. Without noise all passes have it itself; with noise it is split into one
        for each pass, and that into one for the model and one for the noise.
      noise_head: function of (thoughts (batch, d), slot) that returns (mu, log_sigma);
        used if `config.noise`. Of a pass whose vector is cut off from gradients, the
        head's own weights still have theirs.
      eps: (num_passes, batch, d) float, the noise, instead of drawing it.
      d_latent: d, for the shape of thoughts if no pass is made.
      map_thought: function of (thoughts (batch, d), slot) that replaces them, where
        there is no noise.

    Raises:
      ConfigError: see `LatentConfig.passes`; or there is no head for the noise.
    """
    passes = config.passes(n_latents)
    positions = slot_positions(start_index, n_latents)
    full = active_slots(levels, n_latents, passes, config.mode)
    values = jnp.zeros((*positions.shape, d_latent or 1), jnp.float32)
    rows = jnp.arange(positions.shape[0])
    keys = [(rng, None)] * passes
    if config.noise and rng is not None and passes:
        keys = [tuple(jax.random.split(key)) for key in jax.random.split(rng, passes)]
    sigma = jnp.float32(0.0)
    for j, (key, noise_key) in enumerate(keys):
        seen = full & (jnp.arange(n_latents) < j)
        hidden = forward(values, positions, seen, key)
        at = positions[:, 0] - 1 + j
        # Past the end of a prefix that is too short there is nothing to take.
        short = (at >= hidden.shape[1])[:, None]
        z = jnp.where(short, jnp.nan, hidden[rows, at])
        if config.trunc and j < passes - config.trunc:
            z = jax.lax.stop_gradient(z)
        if config.noise:
            noise = None if eps is None else eps[j]
            z, sigma = _noisy(z, j, noise_head, noise, noise_key)
        elif map_thought is not None:
            z = map_thought(z, j)
        if j == 0:
            values = jnp.zeros((*positions.shape, z.shape[-1]), hidden.dtype)
        values = values.at[:, j].set(z.astype(values.dtype))
    return Latents(values, positions, full, sigma)


def _noisy(
    z: Any,
    j: int,
    noise_head: Callable[[Any, int], tuple[Any, Any]] | None,
    eps: Any,
    key: Any,
) -> tuple[Any, Any]:
    """Returns (random thoughts, their mean deviation)."""
    if noise_head is None:
        raise ValueError(
            "noise=True needs a model with a noise head: "
            "LatentTransformerLM(noise_head=True)."
        )
    mu, log_sigma = noise_head(z, j)
    if eps is None:
        if key is None:
            raise ValueError(
                "random thoughts (noise=True) need a random key, got rng=None; pass "
                "rng=jax.random.key(seed)."
            )
        eps = jax.random.normal(key, mu.shape, jnp.float32)
    sigma = jnp.exp(jnp.clip(log_sigma.astype(jnp.float32), *_LOG_SIGMA_RANGE))
    return mu + sigma * eps, jnp.mean(sigma)

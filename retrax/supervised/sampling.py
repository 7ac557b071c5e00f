"""Choosing the next token from a model's outputs.

First in the order of decoding, under `cached_model`, `beam` and `decoding`. Pure
functions of arrays; what a loop must be compiled anew for is in a `Rule`, the rest in a
dict of scalars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["PAD_ID", "Rule", "ban_eos", "keys_of", "next_tokens", "rule_and_values"]

PAD_ID = 0  # What stands in a row after its end.
_NO_ID = -1  # An eos_id that no token has.


@dataclass(frozen=True)
class Rule:
    """How tokens are chosen, as far as it shapes the compiled code.

    Attributes:
      greedy: take the most probable token.
      top_k: choose among this many of the most probable tokens; None is all.
      nucleus: choose among the fewest tokens that have probability `top_p` together.
    """

    greedy: bool
    top_k: int | None
    nucleus: bool


def rule_and_values(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    min_length: int = 0,
) -> tuple[Rule, dict[str, Any]]:
    """Returns (rule, values) for `next_tokens`.

    Raises:
      ValueError: an argument is out of its range.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"temperature must be 0 (the most probable token) or a positive number, "
            f"got {temperature}."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 token (or None), got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] (or None), got {top_p}.")
    if min_length < 0:
        raise ValueError(f"min_length must not be negative, got {min_length}.")
    greedy = temperature == 0
    nucleus = not greedy and top_p is not None and top_p < 1
    values = {
        "temperature": float(temperature),
        "top_p": 1.0 if top_p is None else float(top_p),
        "eos_id": _NO_ID if eos_id is None else int(eos_id),
        "min_length": int(min_length),
    }
    return Rule(greedy, None if greedy else top_k, nucleus), values


def next_tokens(
    logits: Any, rngs: Any, t: Any, rule: Rule, values: dict[str, Any]
) -> Any:
    """Chooses token t of each row.

    First the temperature divides the logits, then top_k and then top_p leave out the
    less probable tokens (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751, for
    top_p); of the rest one is drawn by the Gumbel-max trick. Tokens as probable as the
    last one that stays, stay as well. The draw of a row depends on its key alone, and
    so neither on other rows nor on how many there are.

    Args:
      logits: (batch, vocab_size) float, log-probabilities up to a constant.
      rngs: (batch,) keys, one for each row, see `keys_of`.
      t: number of tokens before this one.
      rule: what is compiled in.
      values: scalars of `rule_and_values`.

    Returns:
      (batch,) int32.
    """
    logits = ban_eos(logits, t, values)
    if rule.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    n_vocab = logits.shape[-1]
    logits = logits / values["temperature"]
    if rule.top_k is not None and rule.top_k < n_vocab:
        least = jax.lax.top_k(logits, rule.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if rule.nucleus:
        down = -jnp.sort(-logits, axis=-1)
        p = jax.nn.softmax(down, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        least = jnp.where(before < values["top_p"], down, jnp.inf)
        least = jnp.min(least, axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (n_vocab,), logits.dtype))(rngs)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def keys_of(rng: Any, t: Any, n_rows: int) -> tuple[Any, Any]:
    """Derives from a sequence's key: ((n_rows,) keys for token t, the model's key)."""
    rng_tokens, rng_model = jax.random.split(rng)
    key = jax.random.fold_in(rng_tokens, t)
    rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(n_rows))
    return rows, jax.random.fold_in(rng_model, t)


def ban_eos(logits: Any, t: Any, values: dict[str, Any]) -> Any:
    """Makes the end impossible as token t if a row must have more tokens first."""
    is_eos = jnp.arange(logits.shape[-1]) == values["eos_id"]
    return jnp.where(is_eos & (t < values["min_length"]), -jnp.inf, logits)

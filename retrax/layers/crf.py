"""A linear-chain conditional random field: `CRF`, its loss, its metric, `viterbi`.

Above `weighted`, whose protocol of weights the loss and the metric keep. A model that
labels sequences ends in `CRF()`; its output, the *potentials*, is one tensor that goes
where other models' scores go: into a loss, into metrics, into `viterbi`.

All masks are allowed: positions without weight are passed over, and the positions
beside them become neighbours.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax import trees
from retrax.layers import initializers as init
from retrax.layers.base import Layer
from retrax.layers.weighted import WeightedMean, at_least_float32

__all__ = ["CRF", "CRFAccuracy", "CRFLoss", "crf_log_likelihood", "viterbi"]


@gin.configurable(module="retrax.layers")
class CRF(Layer):
    """Adds scores of pairs of neighbouring tags to scores of tags.

    potentials[b, t, i, j] = x[b, t, j] + transitions[i, j] is the score of tag j at t
    after tag i; i = n_tags stands for no tag before (Lafferty et al. 2001; Lample et
    al. 2016, https://arxiv.org/abs/1603.01360, section 2.2, with no score for the end).

    x: (batch, length, n_tags) float,
    potentials: (batch, length, n_tags + 1, n_tags). Weights: transitions, a bare array.

    Example:
      >>> from retrax import layers as tl
      >>> tagger = tl.Serial(tl.Dense(3), tl.CRF())
      >>> from retrax.shapes import ShapeDtype
      >>> _ = tagger.init(ShapeDtype((2, 5, 8)))
      >>> potentials = tagger(jnp.ones((2, 5, 8)))
      >>> tags, score = tl.viterbi(potentials, mask=jnp.ones((2, 5)))
      >>> tags.shape, score.shape
      ((2, 5), (2,))
      >>> loss = tl.CRFLoss()((potentials, tags, jnp.ones((2, 5))))  # nats per tag
    """

    def __init__(self, name: str | None = None) -> None:
        """Makes the layer; the number of tags is that of its input."""
        super().__init__(name=name)

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the transitions, normal with deviation 0.01."""
        shape = input_signature.shape
        if len(shape) != 3:
            raise ValueError(
                f"CRF needs scores of shape (batch, length, n_tags), got {shape}."
            )
        n_tags = shape[-1]
        initializer = init.RandomNormalInitializer(0.01)
        self.weights = initializer((n_tags + 1, n_tags), self.rng)

    def forward(self, x: Any) -> Any:
        """Computes the potentials."""
        return x[..., None, :] + self.weights


@gin.configurable(module="retrax.layers")
class CRFLoss(WeightedMean):
    """Computes the negative log-likelihood of tags, in nats per tag.

    Inputs: potentials (batch, length, n_tags + 1, n_tags) float, tags (batch, length)
    int, weights (batch, length), of which only matters whether they are 0. The value is
    the sum over sequences divided by the number of tags with weight.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (mean over the sequence's tags, number of its tags)."""
        potentials, tags, weights = inputs
        n_tags = jnp.sum(weights != 0, axis=-1)
        value = -crf_log_likelihood(potentials, tags, weights)
        return value / jnp.maximum(n_tags, 1), n_tags


@gin.configurable(module="retrax.layers")
class CRFAccuracy(WeightedMean):
    """Computes the share of tags that the best sequence has right.

    Inputs as those of `CRFLoss`.
    """

    def per_example(self, inputs: Any) -> tuple[Any, Any]:
        """Returns (1 for a right tag, 0 for a wrong one; 1 where there is weight)."""
        potentials, tags, weights = inputs
        _check(potentials, tags, weights)
        best, _ = viterbi(potentials, weights)
        return best == tags, weights != 0


def crf_log_likelihood(potentials: Any, tags: Any, mask: Any = None) -> Any:
    """Returns the log-probabilities of sequences of tags, (batch,).

    log p = score(tags) - log sum over all sequences of exp(score), a score being the
    sum of the potentials along a sequence (Lample et al. 2016, section 2.2). It is 0
    for a sequence that is masked wholly.

    Args:
      potentials: (batch, length, n_tags + 1, n_tags) float, as `CRF` gives them.
      tags: (batch, length) int in [0, n_tags); anything where masked.
      mask: (batch, length), other than 0 where there is a tag; None: everywhere.

    Raises:
      ValueError: shapes do not fit, or a tag is out of range (not under jit, where it
        is clipped into the range).
      TypeError: the tags are not integers.
    """
    _check(potentials, tags, mask)
    potentials = at_least_float32(potentials)
    mask = jnp.ones(tags.shape, bool) if mask is None else mask != 0
    _check_range(tags, mask, potentials.shape[-1])
    n_tags = potentials.shape[-1]
    tags = jnp.clip(tags, 0, n_tags - 1)
    pairs = _tags_before(tags, mask, n_tags) * n_tags + tags
    flat = jnp.reshape(potentials, (*tags.shape, -1))
    scores = jnp.take_along_axis(flat, pairs[..., None], axis=-1)[..., 0]
    score = jnp.sum(jnp.where(mask, scores, 0), axis=-1)
    return score - _log_partition(potentials, mask)


def viterbi(potentials: Any, mask: Any = None) -> tuple[Any, Any]:
    """Returns the best sequences of tags, (batch, length) int32, and their scores.

    Args:
      potentials: (batch, length, n_tags + 1, n_tags) float, as `CRF` gives them.
      mask: (batch, length), other than 0 where a tag is sought; None: everywhere. Tags
        are 0 where masked.

    Raises:
      ValueError: shapes do not fit.
    """
    _check(potentials, None, mask)
    potentials = at_least_float32(potentials)
    n_rows, length, _, n_tags = potentials.shape
    mask = jnp.ones((n_rows, length), bool) if mask is None else mask != 0

    def forward(carry: Any, step: Any) -> tuple[Any, Any]:
        best, started = carry
        pair_scores, is_tag = step
        totals = best[:, :, None] + pair_scores[:, :n_tags]
        extended = jnp.where(
            started[:, None], jnp.max(totals, axis=1), pair_scores[:, n_tags]
        )
        goes_on = (is_tag & started)[:, None]
        came_from = jnp.where(goes_on, jnp.argmax(totals, axis=1), jnp.arange(n_tags))
        best = jnp.where(is_tag[:, None], extended, best)
        return (best, started | is_tag), came_from

    start = (jnp.zeros((n_rows, n_tags), potentials.dtype), jnp.zeros(n_rows, bool))
    steps = (jnp.swapaxes(potentials, 0, 1), mask.T)
    (best, _), came_from = jax.lax.scan(forward, start, steps)

    def backward(tag: Any, step: Any) -> tuple[Any, Any]:
        came_from, is_tag = step
        before = jnp.take_along_axis(came_from, tag[:, None], axis=1)[:, 0]
        return before, jnp.where(is_tag, tag, 0)

    last = jnp.argmax(best, axis=-1)
    _, tags = jax.lax.scan(backward, last, (came_from, mask.T), reverse=True)
    return tags.T.astype(jnp.int32), jnp.max(best, axis=-1)


def _log_partition(potentials: Any, mask: Any) -> Any:
    """The forward algorithm: log of the sum over all sequences; 0 if there is none."""
    n_rows, _, _, n_tags = potentials.shape

    def step(carry: Any, x: Any) -> tuple[Any, None]:
        logs, started = carry
        pair_scores, is_tag = x
        totals = jax.nn.logsumexp(logs[:, :, None] + pair_scores[:, :n_tags], axis=1)
        new = jnp.where(started[:, None], totals, pair_scores[:, n_tags])
        return (jnp.where(is_tag[:, None], new, logs), started | is_tag), None

    start = (jnp.zeros((n_rows, n_tags), potentials.dtype), jnp.zeros(n_rows, bool))
    steps = (jnp.swapaxes(potentials, 0, 1), mask.T)
    (logs, started), _ = jax.lax.scan(step, start, steps)
    return jnp.where(started, jax.nn.logsumexp(logs, axis=-1), 0)


def _tags_before(tags: Any, mask: Any, none: int) -> Any:
    """For each position the last tag before it that is not masked, or `none`."""
    length = tags.shape[-1]
    places = jnp.where(mask, jnp.arange(length), -1)
    latest = jax.lax.cummax(places, axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    found = jnp.take_along_axis(tags, jnp.maximum(before, 0), axis=1)
    return jnp.where(before >= 0, found, none)


def _check(potentials: Any, tags: Any, mask: Any) -> None:
    shape = tuple(potentials.shape)
    if len(shape) != 4 or shape[2] != shape[3] + 1:
        raise ValueError(
            "potentials must have shape (batch, length, n_tags + 1, n_tags), got "
            f"{shape}; end the model with CRF(), which makes them of scores."
        )
    for what, x in (("tags", tags), ("the mask or weights", mask)):
        if x is not None and tuple(x.shape) != shape[:2]:
            raise ValueError(
                f"{what} have shape {tuple(x.shape)} but the potentials, {shape}, ask "
                f"for {shape[:2]}."
            )
    if tags is not None and not jnp.issubdtype(tags.dtype, jnp.integer):
        raise TypeError(f"tags must be integers, got {tags.dtype}.")


def _check_range(tags: Any, mask: Any, n_tags: int) -> None:
    if not trees.is_concrete((tags, mask)):
        return
    wrong = mask & ((tags < 0) | (tags >= n_tags))
    if wrong.any():
        got = int(jnp.asarray(tags)[wrong][0])
        raise ValueError(f"tags must be in [0, {n_tags}), got {got}.")

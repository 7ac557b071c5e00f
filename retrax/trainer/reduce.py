"""How replicas agree: `Reduce`, for gradients, losses, metrics, state and keys.

Pure functions of values, called while tracing, under `step`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from retrax.errors import ConfigError

__all__ = ["Reduce", "as_pair", "ratio", "reduced_metrics"]

_EPSILON = 1e-8  # Beside the weight of a metric, so that no weight gives 0.


class Reduce:
    """How replicas agree on gradients, losses and metrics.

    Args:
      axis: name of the device axis, None on one device.
      n: number of devices on it.
      kind: 'weight': sum(g_r * n_r) / sum(n_r) with n_r the sum of the loss weights, so
        that several devices equal one also when weights are uneven; 'mean': plain mean
        over replicas (Trax); 'adasum': the sum that counts common directions once
        (arXiv 2006.02924), for a power of two of devices.
    """

    KINDS = ("weight", "mean", "adasum")

    def __init__(
        self, axis: str | None = None, n: int = 1, kind: str = "weight"
    ) -> None:
        if kind not in self.KINDS:
            raise ConfigError(f"reduce must be one of {self.KINDS}, got {kind!r}.")
        if kind == "adasum" and n & (n - 1):
            raise ConfigError(f"adasum needs a power of two of devices, got {n}.")
        self.axis, self.n, self.kind = axis, n, kind

    def share(self, weight: Any) -> Any:
        """The part of this replica's loss in the loss of the whole batch."""
        if self.axis is None or self.kind == "adasum":
            return 1.0
        if self.kind == "mean" or weight is None:
            return 1.0 / self.n
        return ratio(weight, jax.lax.psum(weight, self.axis))

    def total(self, weight: Any) -> Any:
        """The weight of the whole batch; 1 where nothing weighs."""
        if weight is None or self.kind != "weight":
            return jnp.float32(1.0)
        return jax.lax.stop_gradient(self.sum(jnp.float32(weight)))

    def sum(self, tree: Any) -> Any:
        """Adds up over replicas."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)

    def losses(self, loss: Any) -> Any:
        """Joins losses that carry their share."""
        return self.sum(loss) / (self.n if self.kind == "adasum" else 1)

    def gradients(self, grads: Any) -> Any:
        """Joins gradients of losses that carry their share."""
        if self.axis is None:
            return grads
        if self.kind != "adasum":
            return jax.lax.psum(grads, self.axis)
        return jax.tree.map(lambda g: _adasum(jax.lax.all_gather(g, self.axis)), grads)

    def joined(self, x: Any) -> Any:
        """Joins arrays of the replicas along the first axis."""
        if self.axis is None:
            return x
        return jax.lax.all_gather(x, self.axis, tiled=True)

    def summary(self, x: Any) -> Any:
        """Averages a number over the replicas, and joins an array."""
        if self.axis is None or jnp.ndim(x):
            return self.joined(x)
        return jax.lax.pmean(jnp.asarray(x, jnp.float32), self.axis)

    def key(self, rng: Any) -> Any:
        """Gives each replica its own random key."""
        if self.axis is None:
            return rng
        return jax.random.fold_in(rng, jax.lax.axis_index(self.axis))

    def state(self, new: Any, old: Any, sync: list[str | None]) -> Any:
        """Joins model state by each leaf's declared `state_sync`."""
        if self.axis is None:
            return new
        leaves, treedef = jax.tree.flatten(new)
        joined = []
        for x, before, how in zip(leaves, jax.tree.leaves(old), sync, strict=True):
            if how == "sum":
                x = before + jax.lax.psum(x - before, self.axis)
            elif how == "mean" and jnp.issubdtype(x.dtype, jnp.floating):
                x = jax.lax.pmean(x, self.axis)
            joined.append(x)
        return treedef.unflatten(joined)


def reduced_metrics(metrics: dict[str, Any], reduce: Reduce) -> dict[str, Any]:
    """Joins metrics by weight, as sum(v w) / (sum(w) + 1e-8) over replicas.

    Args:
      metrics: name -> scalar, or (mean, weight).
      reduce: how replicas agree.

    Returns:
      name -> mean; of a metric with a weight also '{name}/weight'.
    """
    pairs = {name: as_pair(value) for name, value in metrics.items()}
    sums = reduce.sum({name: (v * w, w) for name, (v, w) in pairs.items()})
    totals = {
        f"{name}/weight": sums[name][1]
        for name, value in metrics.items()
        if isinstance(value, tuple)
    }
    if reduce.axis is None:
        return totals | {name: ratio(v, w) for name, (v, w) in sums.items()}
    return totals | {name: v / (w + _EPSILON) for name, (v, w) in sums.items()}


def as_pair(value: Any) -> tuple[Any, Any]:
    """Returns (mean, weight) of a metric; a bare number weighs 1."""
    value, weight = value if isinstance(value, tuple) else (value, 1.0)
    return jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32)


def ratio(x: Any, total: Any) -> Any:
    """x / total, and 0 where nothing weighs anything."""
    empty = total == 0
    return jnp.where(empty, 0, x / jnp.where(empty, 1, total))


def _adasum(parts: Any) -> Any:
    """Joins (n, ...) gradients pairwise, n a power of two (arXiv 2006.02924, eq. 5)."""
    while parts.shape[0] > 1:
        a, b = parts[0::2], parts[1::2]
        axes = tuple(range(1, a.ndim))
        dot = jnp.sum(a * b, axes, keepdims=True)
        norm_a = jnp.sum(a * a, axes, keepdims=True)
        norm_b = jnp.sum(b * b, axes, keepdims=True)
        parts = (1 - ratio(dot, 2 * norm_a)) * a + (1 - ratio(dot, 2 * norm_b)) * b
    return parts[0]

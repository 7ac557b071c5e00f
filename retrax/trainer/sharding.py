"""How weights lie on several devices when they are not whole on each.

`Sharding` says which weights are cut along which axes; `plan` turns it into a placement
of everything that goes round in training. Compiling is left to `devices`, the cutting
of computations to XLA (GSPMD, https://arxiv.org/abs/2105.04663; whole weights cut over
the devices that split the batch: ZeRO, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gin
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from retrax.errors import ConfigError

__all__ = ["BATCH", "MODEL", "Sharding", "as_sharding", "plan"]

BATCH, MODEL = "batch", "model"


@gin.configurable(module="retrax.trainer")
@dataclasses.dataclass(frozen=True)
class Sharding:
    """Which weights are cut, and over which devices.

    Devices form a grid of (n_devices / n_model, n_model); its axes are called 'batch',
    which the batch is cut along, and 'model'.

    Attributes:
      rules: regular expression -> `jax.sharding.PartitionSpec`, for weights whose path
        (as in `summary` and error texts, such as '0.Serial/1.Dense/0') holds a match;
        the first one counts. Of the spec's axes each may be None, 'batch' or 'model'. A
        tuple of these will do as well, as gin has no specs.
      fsdp: cut what no rule is for along its longest axis that divides by the number of
        devices on axis 'batch'; other weights are whole on each device.
      n_model: number of devices along the axis 'model'.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> Sharding({'Dense.*/0$': P(None, 'model')}, n_model=2).n_model
      2
    """

    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fsdp: bool = False
    n_model: int = 1

    def __post_init__(self) -> None:
        rules = {
            pattern: PartitionSpec(*spec) if isinstance(spec, (list, tuple)) else spec
            for pattern, spec in self.rules.items()
        }
        object.__setattr__(self, "rules", rules)

    def mesh_shape(self, n_devices: int) -> tuple[int, int]:
        """Returns the grid's sizes.

        Raises:
          ConfigError: n_model does not divide the number of devices.
        """
        if self.n_model < 1 or n_devices % self.n_model:
            raise ConfigError(
                f"n_model={self.n_model} does not divide {n_devices} devices."
            )
        return n_devices // self.n_model, self.n_model


def as_sharding(sharding: Any) -> Sharding | None:
    """Returns a `Sharding` for itself or 'fsdp', and None for None.

    Raises:
      ConfigError: it is something else.
    """
    if sharding is None or isinstance(sharding, Sharding):
        return sharding
    if sharding == "fsdp":
        return Sharding(fsdp=True)
    raise ConfigError(
        "sharding must be None (weights are whole on each device), 'fsdp', or a "
        f"Sharding with rules such as Sharding({{'Dense.*/0$': PartitionSpec(None, "
        f"'model')}}, n_model=2), got {sharding!r}."
    )


def plan(
    sharding: Sharding,
    mesh: Mesh,
    named_weights: Sequence[tuple[str, Any]],
    trainable: Sequence[bool],
    slots: Any,
) -> tuple[list[NamedSharding], Any]:
    """Places weights and slots.

    Args:
      sharding: what is asked for.
      mesh: the grid of devices.
      named_weights: [(path, array or shape), ...] of all weights.
      trainable: for each of them, whether it is trained.
      slots: the optimizer's; a slot of the shape of its weight lies as that does.

    Returns:
      (placement of each weight, tree of placements of the slots).

    Raises:
      ConfigError: a rule matches no weight, names an axis that there is not, or does
        not divide a weight; says which, and the sizes.
    """
    used: set[str] = set()
    specs = [
        _spec_of(sharding, mesh, path, np.shape(x), used) for path, x in named_weights
    ]
    unused = [pattern for pattern in sharding.rules if pattern not in used]
    if unused:
        some = ", ".join(path for path, _ in named_weights[:8])
        raise ConfigError(
            f"the sharding rule {unused[0]!r} matches no weight. Paths are: {some}"
            f"{', ...' if len(named_weights) > 8 else ''}."
        )
    trained = [
        (np.shape(x), spec)
        for (_, x), spec, on in zip(named_weights, specs, trainable, strict=True)
        if on
    ]

    def placed(x: Any, own: Sequence[tuple[Any, Any]]) -> NamedSharding:
        shape = np.shape(x)
        for weight_shape, spec in own:
            if shape == weight_shape:
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, _default(sharding, mesh, shape))

    if len(slots) == len(trained):  # One entry for each weight.
        parts = [
            jax.tree.map(lambda x, own=own: placed(x, [own]), slot)
            for slot, own in zip(slots, trained, strict=True)
        ]
        placed_slots = type(slots)(parts)
    else:
        placed_slots = jax.tree.map(lambda x: placed(x, trained), slots)
    return [NamedSharding(mesh, spec) for spec in specs], placed_slots


def _spec_of(
    sharding: Sharding, mesh: Mesh, path: str, shape: Any, used: set[str]
) -> PartitionSpec:
    found = None
    for pattern, spec in sharding.rules.items():
        if re.search(pattern, path):
            used.add(pattern)
            found = found or (pattern, spec)
    if found is None:
        return _default(sharding, mesh, shape)
    _check(*found, mesh, path, shape)
    return found[1]


def _default(sharding: Sharding, mesh: Mesh, shape: Any) -> PartitionSpec:
    """Cuts the longest axis that divides, if all weights are to be cut."""
    n = mesh.shape[BATCH]
    fits = [axis for axis, size in enumerate(shape) if size >= n and size % n == 0]
    if not sharding.fsdp or not fits:
        return PartitionSpec()
    longest = max(fits, key=lambda axis: shape[axis])
    return PartitionSpec(*(None,) * longest, BATCH)


def _check(pattern: str, spec: Any, mesh: Mesh, path: str, shape: Any) -> None:
    where = f"the sharding rule {pattern!r} -> {spec} for the weight {path} {shape}"
    if not isinstance(spec, PartitionSpec):
        raise ConfigError(f"{where} must give a jax.sharding.PartitionSpec.")
    if len(spec) > len(shape):
        raise ConfigError(f"{where} names {len(spec)} axes of {len(shape)}.")
    for size, names in zip(shape, spec, strict=False):
        names = () if names is None else (names,) if isinstance(names, str) else names
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise ConfigError(
                f"{where} names {unknown[0]!r}; axes of the devices are {BATCH!r} and "
                f"{MODEL!r}."
            )
        n = math.prod(mesh.shape[name] for name in names)
        if size % n:
            raise ConfigError(
                f"{where} cuts an axis of {size} into {n}, which does not divide it; "
                f"the devices are {dict(mesh.shape)}."
            )

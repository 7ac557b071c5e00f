"""retrax: training deep networks from composable layers, on JAX.

The subpackages are imported when first used, so that `import retrax` costs no more
than `import jax` and never loads an optional dependency.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import jax as _jax  # noqa: F401  (users expect `import retrax` to fail without JAX)

__version__ = "0.1.0"

_SUBPACKAGES = (
    "data",
    "layers",
    "models",
    "optimizers",
    "shapes",
    "supervised",
    "trainer",
    "trees",
    "errors",
)
_ALIASES = {"lr": "retrax.supervised.lr_schedules"}

__all__ = ["__version__", "lr", *_SUBPACKAGES]

if TYPE_CHECKING:
    from retrax import (
        data,
        errors,
        layers,
        models,
        optimizers,
        shapes,
        supervised,
        trainer,
        trees,
    )
    from retrax.supervised import lr_schedules as lr


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"retrax.{name}")
    if name in _ALIASES:
        return importlib.import_module(_ALIASES[name])
    raise AttributeError(f"module 'retrax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

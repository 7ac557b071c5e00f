"""retrax: training deep networks from composable layers, on JAX.

The subpackages are imported when first used, so that `import retrax` costs no more
than `import jax` and never loads an optional dependency.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import jax as _jax  # noqa: F401  (users expect `import retrax` to fail without JAX)

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "data",
    "errors",
    "layers",
    "lr",
    "models",
    "optimizers",
    "shapes",
    "storage",
    "supervised",
    "trainer",
    "trees",
]
_MODULES = {name: f"retrax.{name}" for name in __all__ if name != "__version__"}
_MODULES["lr"] = "retrax.supervised.lr_schedules"

if TYPE_CHECKING:
    from retrax import data as data
    from retrax import errors as errors
    from retrax import layers as layers
    from retrax import models as models
    from retrax import optimizers as optimizers
    from retrax import shapes as shapes
    from retrax import storage as storage
    from retrax import supervised as supervised
    from retrax import trainer as trainer
    from retrax import trees as trees
    from retrax.supervised import lr_schedules as lr


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'retrax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""Checkpoint files: one file, whole or absent, of plain containers and arrays.

Beside `errors` in the order: knows neither layers nor trainers. `save` and `load` are
the format; `match` says which saved arrays belong to which wanted ones.
"""

from retrax.storage.checkpoint import (
    CheckpointDamaged,
    exists,
    load,
    load_newest,
    previous_path,
    save,
)
from retrax.storage.matching import Matched, MatchReport, match

__all__ = [
    "CheckpointDamaged",
    "MatchReport",
    "Matched",
    "exists",
    "load",
    "load_newest",
    "match",
    "previous_path",
    "save",
]

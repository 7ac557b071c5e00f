"""The output directory of a run: can it be used, and what else goes in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import gin

from retrax.errors import ConfigError
from retrax.trainer import hosts

__all__ = ["check_output_dir", "gin_text"]


def check_output_dir(path: Path | None) -> None:
    """Makes the directory if needed, and sees that files can be written in it.

    Of several processes the first alone does so; what it finds all are told.

    Raises:
      ConfigError: it is a file, or nothing can be written there.
    """

    def check() -> bytes:
        if path is not None:
            _check(path)
        return b""

    hosts.from_first(check)


def _check(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output_dir {path} is a file; choose a directory.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        reason = os.strerror(e.errno) if e.errno else str(e)
        raise ConfigError(
            f"output_dir {path} cannot be written ({reason}); choose a directory where "
            "you may create files."
        ) from e


def gin_text() -> str:
    """Returns the gin configuration in effect, as text that reproduces the run."""
    return gin.operative_config_str()

"""Finding and reading gin configurations, with errors that help.

gin says what it does not know; this module adds what it does know that is near.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import gin

from retrax.data.inputs import Inputs
from retrax.errors import ConfigError

__all__ = ["find", "inputs_of", "read", "read_run", "shipped"]

_PACKAGES = (
    "retrax.layers",
    "retrax.models",
    "retrax.optimizers",
    "retrax.data",
    "retrax.supervised.lr_schedules",
    "retrax.supervised.trainer_lib",
    "retrax.supervised.training",
    "retrax.supervised.callbacks",
    "retrax.supervised.latent_config",
    "retrax.supervised.latent_layers",
    "retrax.supervised.curriculum",
)


def shipped() -> dict[str, str]:
    """Returns name -> first comment line of the configurations that ship."""
    found = {}
    for item in sorted(resources.files("retrax").joinpath("gin").iterdir(), key=str):
        if item.name.endswith(".gin"):
            first = item.read_text().splitlines()[:1]
            found[item.name] = first[0].lstrip("# ") if first else ""
    return found


def find(name: str) -> str:
    """Returns the path of a configuration file given by path or shipped name.

    Raises:
      ConfigError: there is none; lists what ships.
    """
    if Path(name).is_file():
        return name
    names = shipped()
    for candidate in (name, f"{name}.gin"):
        if candidate in names:
            return str(resources.files("retrax").joinpath("gin", candidate))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    did_you_mean = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"there is no configuration file {name!r}, neither as a path nor among those "
        f"that ship: {', '.join(names)}.{did_you_mean}"
    )


def read(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Parses configuration files, then bindings, into gin.

    Raises:
      ConfigError: a file or a binding is wrong; names near ones.
    """
    for package in _PACKAGES:
        importlib.import_module(package)
    _search_shipped()
    paths = [find(name) for name in files]
    try:
        gin.parse_config_files_and_bindings(
            paths, list(bindings), print_includes_and_imports=False
        )
    except SyntaxError as e:
        raise ConfigError(_syntax_text(e, bindings)) from e
    except ImportError as e:
        raise ConfigError(
            f"{_without_carets(e)}\n  Modules that a configuration imports are looked "
            "for in the current directory and among what is installed."
        ) from e
    except KeyError as e:
        text = _without_carets(e).replace('"', "")
        raise ConfigError(
            f"{text}\n  Write enough of its module to tell them apart, such as "
            "lr_schedules.constant."
        ) from e
    except (ValueError, OSError) as e:
        raise ConfigError(f"{_without_carets(e)}{_nearest(str(e))}") from e


def read_run(
    folder: str, files: Sequence[str], bindings: Sequence[str]
) -> dict[str, Any]:
    """Parses the configuration of a finished run; returns what `train` is bound to.

    Args:
      folder: the run's output directory.
      files: configuration files instead of the run's own config.gin.
      bindings: bindings on top of them.

    Raises:
      ConfigError: there is no run, or it binds no model or no inputs.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is no directory of a run.")
    own = Path(folder) / "config.gin"
    if not files and not own.is_file():
        raise ConfigError(
            f"{folder} holds no run: there is no config.gin in it. Give the output_dir "
            "of a training, or --config_file as well."
        )
    files = files or [str(own)]
    read(files, bindings)
    bound = gin.get_bindings("train")
    for name in ("model", "inputs"):
        if name not in bound:
            raise ConfigError(f"{', '.join(files)} binds no train.{name}.")
    return bound


def inputs_of(bound: dict[str, Any]) -> Inputs:
    """Makes the inputs that `train` is bound to.

    Raises:
      ConfigError: they are no `Inputs`.
    """
    made = bound["inputs"]
    inputs = made() if callable(made) else made
    if not isinstance(inputs, Inputs):
        raise ConfigError(f"train.inputs makes no data.Inputs but {inputs!r}.")
    return inputs


@functools.cache
def _search_shipped() -> None:
    """Lets configurations include those that ship by their bare names."""
    gin.add_config_file_search_path(str(resources.files("retrax").joinpath("gin")))
    # gin logs each place where an included file is not, even if it is at the next.
    logging.getLogger().addFilter(lambda record: record.msg != "Path not found: %s")


def _syntax_text(e: SyntaxError, bindings: Sequence[str]) -> str:
    lines = "\n".join(bindings).splitlines()
    number = e.lineno or 0
    if e.filename:
        return f"{e.filename}, line {number}: {e.msg}\n  {(e.text or '').strip()}"
    binding = lines[number - 1] if 0 < number <= len(lines) else "?"
    return f"--config={binding!r}: {e.msg}"


def _without_carets(e: BaseException) -> str:
    lines = [line.strip() for line in str(e).splitlines()]
    return "\n  ".join(line for line in lines if line.strip("^"))


def _nearest(text: str) -> str:
    parameter = re.search(
        r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", text
    )
    if parameter:
        target = gin.get_configurable(parameter.group(1))
        names = [n for n in inspect.signature(target).parameters if n != "self"]
        return _listed(parameter.group(2), names, "It has")
    missing = re.search(r"No configurable matching (?:reference )?'?@?([\w./]+)", text)
    if missing:
        name = re.split("[./]", missing.group(1))[-1]
        return _listed(name, _configurables(), "There are")
    return ""


def _listed(wanted: str, names: Sequence[str], intro: str) -> str:
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    if near:
        return f"\n  Did you mean {' or '.join(near)}?"
    return f"\n  {intro}: {', '.join(sorted(names))}." if names else ""


def _configurables() -> list[str]:
    """Names of ours that a configuration can bind."""
    known = set()
    for package in _PACKAGES:
        for name in importlib.import_module(package).__all__:
            try:
                gin.get_configurable(name)
            except KeyError:  # The name of several configurables, which gin refuses.
                pass
            except ValueError:
                continue
            known.add(name)
    return sorted(known)

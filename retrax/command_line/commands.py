"""The commands: train, eval, configs, doctor; the others have modules of their own."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
from typing import Any

import retrax
from retrax.command_line import (
    compare,
    configs,
    inspect,
    launch,
    plot,
    predict,
    runs,
    verify_resume,
)
from retrax.errors import ConfigError
from retrax.trainer.checkpointer import NotSaved
from retrax.trainer.interrupts import Interrupted

__all__ = ["INTERRUPTED", "NOT_SAVED", "USER_ERRORS", "message", "run"]

INTERRUPTED = Interrupted
NOT_SAVED = NotSaved
USER_ERRORS = (ValueError, TypeError, OSError)

_connected: list[Any] = []  # The place of this process among those of a run.

_CORE = ("jax", "jaxlib", "numpy", "optax", "gin-config", "absl-py", "psutil", "tqdm")
_CORE_FILES = ("matplotlib", "tensorboardX")
_EXTRAS = {"tf": "tensorflow", "text": "sentencepiece", "hf": "datasets"}


def run(args: argparse.Namespace) -> int:
    """Runs the command that was parsed; returns the exit code."""
    return {
        "train": _train,
        "eval": _eval,
        "predict": predict.run,
        "inspect": inspect.run,
        "runs": runs.run,
        "plot": plot.run,
        "compare": compare.run,
        "verify-resume": verify_resume.run,
        "launch": launch.run,
        "configs": _configs,
        "doctor": _doctor,
    }[args.command](args)


def message(e: BaseException) -> str:
    """Returns an error's text for a person, never empty."""
    if isinstance(e, OSError) and e.filename:
        return f"{e.filename}: {e.strerror or e}"
    # gin says through which functions an error passed; their addresses say nothing.
    text = re.sub(r"(In call to configurable '[^']*') \(<.*>\)", r"\1", str(e))
    return text.strip() or type(e).__name__


def _train(args: argparse.Namespace) -> int:
    from retrax.supervised import trainer_lib
    from retrax.trainer import allocator, meeting

    allocator.keep_freed_memory()

    if not args.config_file and not args.config:
        raise ConfigError(
            "nothing says what to train: give --config_file. These ship: "
            f"{', '.join(configs.shipped())}."
        )
    _connected.append(
        meeting.connect(
            args.coordinator, args.num_processes, args.process_id, args.connect_timeout
        )
    )
    configs.read(args.config_file, args.config)
    trainer_lib.train(output_dir=args.output_dir)
    return 0


def leave(code: int) -> None:
    """Ends a process that failed where others train with it.

    JAX would wait for them at exit, and they for this one.
    """
    if any(_connected):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _eval(args: argparse.Namespace) -> int:
    from retrax import layers as tl
    from retrax.shapes import ShapeDtype
    from retrax.trainer import Evaluator, load_trainer_state
    from retrax.trainer.default_metrics import default_metrics, target_rank

    bound = configs.read_run(args.dir, args.config_file, args.config)
    loss_fn = bound.get("loss_fn") or tl.WeightedCategoryCrossEntropy()
    model = bound["model"](mode="eval")
    state = load_trainer_state(args.dir, model, args.checkpoint)
    inputs = configs.inputs_of(bound)
    layers = bound.get("metrics")
    if layers is None:
        signature = list(map(ShapeDtype, *inputs.example_shape_dtype))
        layers = default_metrics(loss_fn, target_rank(signature))
    precision = bound.get("precision")
    metrics = Evaluator(model, layers, precision=precision).evaluate(
        inputs.eval_stream(1),
        state.opt_state.weights,
        state.model_state,
        n_batches=args.n_batches,
    )
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"Step {state.step:6d}: eval {name:{width}s} | {value:.8f}")
    print(json.dumps({"step": state.step, **metrics}))
    return 0


def _configs(args: argparse.Namespace) -> int:
    del args
    found = configs.shipped()
    width = max(map(len, found))
    for name, what in found.items():
        print(f"{name:{width}s}  {what}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    """Shows what a run would stand on; exit code 1 if something needed is missing."""
    del args
    missing = []
    print(f"python       {platform.python_version()} ({sys.executable})")
    print(f"retrax       {retrax.__version__}")
    for name in (*_CORE, *_CORE_FILES):
        version = _version(name)
        print(f"{name:12s} {version or 'MISSING: pip install ' + name}")
        if version is None:
            missing.append(name)
    for extra, name in _EXTRAS.items():
        found = importlib.util.find_spec(name) is not None
        text = (
            _version(name) if found else f"not installed: pip install retrax[{extra}]"
        )
        print(f"{name:12s} {text} (optional)")
    if "jax" not in missing:
        _show_devices()
    _show_memory()
    print("all that is needed is there" if not missing else f"missing: {missing}")
    return 1 if missing else 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show_devices() -> None:
    import jax

    devices = jax.local_devices()
    kinds = sorted({str(d.device_kind) for d in devices})
    print(f"devices      {len(devices)} x {', '.join(kinds)} ({devices[0].platform})")
    for device in devices:
        stats: dict[str, Any] = device.memory_stats() or {}
        if "bytes_limit" in stats:
            print(f"  {device}: {stats['bytes_limit'] / 2**30:.1f} GiB")


def _show_memory() -> None:
    import psutil

    memory = psutil.virtual_memory()
    print(
        f"memory       {memory.available / 2**30:.1f} GiB free of "
        f"{memory.total / 2**30:.1f} GiB, {os.cpu_count()} cores"
    )
    disk = psutil.disk_usage(tempfile.gettempdir())
    print(f"disk         {disk.free / 2**30:.1f} GiB free ({tempfile.gettempdir()})")

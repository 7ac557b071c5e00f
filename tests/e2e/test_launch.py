"""`retrax launch`: two processes that train together, ended in several ways."""

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from retrax import storage

LIMIT = 240
QUICKLY = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

MODULE = """
import gin, numpy as np, os, signal, time
from retrax import data, layers as tl
from retrax.trainer import Callback, hosts

@gin.configurable
def NoisyNet(mode="train"):
    return tl.Serial(
        tl.Dense(8), tl.BatchNorm(axis=0, mode=mode), tl.Relu(),
        tl.Dropout(0.3, mode=mode), tl.Dense(3),
    )

def examples(seed):
    x = np.random.default_rng(seed).normal(size=(60, 5)).astype(np.float32)
    return x, (x[:, 1] > 0).astype(np.int32)

@gin.configurable
def numbered():
    return data.Inputs(
        data.ArrayStream(examples(0), 7, seed=4),
        data.ArrayStream(examples(1), 25, shuffle=False, repeat=False),
    )

@gin.configurable
class Accident(Callback):
    '''At one step of one process sends a signal to it, or to its parent.'''

    def __init__(self, step=0, process=0, name="SIGKILL", parent=False):
        self.what = step, process, name, parent

    def on_step_end(self, step):
        at, process, name, parent = self.what
        if step == at and process == hosts.index():
            pid = os.getppid() if parent else os.getpid()
            os.kill(pid, getattr(signal, name))
            noted = signal.getsignal(signal.SIGTERM).__self__
            while parent and noted.signum is None:  # Until it comes back to us.
                time.sleep(0.01)
"""

CONFIG = """
import launch_parts
train.model = @NoisyNet
train.inputs = @numbered
train.loss_fn = @CategoryCrossEntropy()
train.optimizer = @optimizers.Adam
train.lr_schedule_fn = @lr_schedules.multifactor
train.steps = 40
train.eval_frequency = 20
train.eval_steps = None
CheckpointPolicy.every_steps = 10
"""


@pytest.fixture(autouse=True)
def parts(tmp_path):
    (tmp_path / "launch_parts.py").write_text(MODULE)
    (tmp_path / "launch.gin").write_text(CONFIG)
    return tmp_path


def launch(folder, output, *bindings, n=2):
    """Returns (exit code, text on stdout, text on stderr)."""
    flags = [f"--config={binding}" for binding in bindings]
    done = subprocess.run(
        [sys.executable, "-m", "retrax.cli", "launch", "-n", str(n), "--", "train"]
        + ["--config_file=launch.gin", f"--output_dir={output}", *flags],
        cwd=folder,
        env={**os.environ, **QUICKLY},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout, done.stderr


def leaves(value, path=""):
    """Name -> leaf of nested containers."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: x for i, v in items for k, x in leaves(v, f"{path}/{i}").items()}
    return {path: value}


def accident(step, process, name, parent):
    what = f"Accident.step = {step}", f"Accident.process = {process}"
    what = *what, f"Accident.name = '{name}'", f"Accident.parent = {parent}"
    return "train.callbacks = [@Accident()]", *what


def test_a_run_that_was_stopped_and_killed_ends_with_the_same_bits(parts):
    code, out, err = launch(parts, "whole", *accident(0, 0, "SIGKILL", False))
    assert code == 0, out + err
    assert "[0] Step      0: Starting training on 2 devices of 2 processes." in out
    assert "Training done." in out and "[1] Step" not in out

    code, out, err = launch(parts, "broken", *accident(7, 1, "SIGTERM", True))
    assert code == 143, out + err
    assert "[0] Interrupted by SIGTERM after step" in out and "failed" not in err

    start = time.monotonic()
    code, out, err = launch(parts, "broken", *accident(25, 1, "SIGKILL", False))
    assert time.monotonic() - start < 60
    assert code == 137, out + err
    assert "process 1 (pid " in err and "was killed by SIGKILL" in err
    assert "Run the same command again to continue" in err

    code, out, err = launch(parts, "broken", *accident(0, 0, "SIGKILL", False))
    assert code == 0, out + err
    assert re.search("Continuing from broken.model.pkl at step 2[05].", out), out
    runs = [storage.load(parts / d / "model.pkl") for d in ("whole", "broken")]
    names = ["step", "weights", "state", "slots", "history", "data", "run_key"]
    one, other = (leaves({name: run[name] for name in names}) for run in runs)
    assert one.keys() == other.keys() and len(one) > 20
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_the_error_of_the_process_that_failed_is_told(parts):
    code, out, err = launch(parts, "run", "NoisyNet.mod = 3")
    assert code == 2
    assert "mod" in out and "Its last words:" in err and "exit code 2" in err
    assert not (parts / "run").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--process_id=1"], "process_id=1 without coordinator, num_processes"),
        (
            ["--coordinator=127.0.0.1:9", "--num_processes=2", "--process_id=1"],
            "process 1 found no coordinator at 127.0.0.1:9 within 0.2 s",
        ),
    ],
)
def test_a_process_without_others_says_so(parts, monkeypatch, flags, text, capsys):
    from retrax import cli

    monkeypatch.chdir(parts)
    flags = [*flags, "--connect_timeout=0.2", "--output_dir=run"]
    assert cli.main(["train", "--config_file=launch.gin", *flags]) == 2
    assert text in capsys.readouterr().err and not (parts / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "2"], "say what to start after --"),
        (["-n", "2", "--", "eval", "run"], "launch starts 'train' only, got 'eval'"),
        (["-n", "0", "--", "train"], "at least 1 process"),
    ],
)
def test_what_cannot_be_launched_is_told(arguments, text, capsys):
    from retrax import cli

    assert cli.main(["launch", *arguments]) == 2
    assert text in capsys.readouterr().err

"""Runs of the command line and what they write: exit codes, the lock, no leftovers."""

import json
import os
import platform
import re
import subprocess
import sys

import gin
import pytest

from retrax import cli, storage

ARGUMENTS = [
    "--config_file=digits_mlp.gin",
    "--config=MLP.layer_widths = (8, 10)",
    "--config=train.steps = 3",
    "--config=train.eval_steps = 1",
]

WORKERS = """
import gin
from retrax import data

@gin.configurable
def prefetched():
    digits = data.digits(batch_size=8)
    return data.Inputs(
        data.PrefetchStream(digits.train_stream(), 4), digits.eval_stream()
    )
"""


@pytest.fixture(autouse=True)
def _own_gin(monkeypatch, tmp_path):
    gin.clear_config()
    monkeypatch.chdir(tmp_path)
    yield
    gin.clear_config()


def train(*more):
    return cli.main(["train", *ARGUMENTS, "--output_dir=run", *more])


def test_no_thread_keeps_a_run_with_workers_from_exiting(tmp_path):
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "mine.gin").write_text("import workers\ninclude 'digits_mlp.gin'\n")
    done = subprocess.run(
        [sys.executable, "-m", "retrax.cli", "train", "--config_file=mine.gin"]
        + ["--config=train.inputs = @prefetched", "--config=train.steps = 2"]
        + ["--output_dir=run", "--config=CheckpointPolicy.every_steps = 1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert storage.load(tmp_path / "run/model.pkl")["step"] == 2
    assert not (tmp_path / "run/run.lock").exists()
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "done"


def test_a_run_that_cannot_save_trains_on_and_says_so(tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code = train()
    out, err = capsys.readouterr()
    assert code == cli.EXIT_NOT_SAVED == 3
    # Told after the step that runs when the writing fails, so the first or a later one.
    assert re.search(r"Step +\d: model.pkl is not saved: .*No space left", out), out
    assert "training is done, at step 3" in err and "model.pkl" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run/model.pkl").exists()
    gin.clear_config()
    assert train() == 0
    assert storage.load(tmp_path / "run/model.pkl")["step"] == 3
    capsys.readouterr()

    # Another run in the same directory, while one goes on there.
    owner = {"pid": os.getppid(), "host": platform.node(), "since": "this morning"}
    (tmp_path / "run/run.lock").write_text(json.dumps(owner))
    gin.clear_config()
    code = train("--config=train.steps = 5")
    _, err = capsys.readouterr()
    assert code == 2
    for text in ("is in use", str(os.getppid()), platform.node(), "this morning"):
        assert text in err
    assert storage.load(tmp_path / "run/model.pkl")["step"] == 3

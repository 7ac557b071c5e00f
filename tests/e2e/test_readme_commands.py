"""The README's commands as a newcomer runs them: new processes, another directory."""

import hashlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from retrax import storage

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LIMIT = 300  # seconds


def readme_arguments():
    """Arguments of the interpreter in the README's first command."""
    (line,) = re.findall(r"^.*-m retrax\.trainer .*$", README, re.MULTILINE)
    return shlex.split(line.split("&&")[-1])[1:]


def environment():
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def python(*arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def weights_digest(checkpoint):
    payload, _ = storage.load_newest(checkpoint)
    digest = hashlib.sha256()
    for path, array in sorted(payload["weights"].items()):
        digest.update(path.encode() + np.asarray(array).tobytes())
    return digest.hexdigest()


def measurements(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the first command's result, the directory it ran in)."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    return python(*readme_arguments(), cwd=cwd), cwd


def test_first_command_trains_and_says_so(trained):
    done, _ = trained
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Step   2000: Training done."
    assert done.stderr == ""


def test_held_out_accuracy(trained):
    last = measurements(trained[1] / "runs/digits")[-1]
    assert (last["step"], last["mode"]) == (2000, "eval")
    assert last["metrics/accuracy"] >= 0.97


def test_files_that_the_readme_names(trained):
    folder = trained[1] / "runs/digits"
    table = README.split("| file | what it is |")[1].split("\n\n")[0]
    names = re.findall(r"`([^`]+)`", table)
    assert len(names) == 10
    for name in names:
        assert (folder / name).exists(), name
    for mode in ("train", "eval"):
        (events,) = (folder / mode).glob("events.out.tfevents.*")
        assert events.stat().st_size > 500
    assert [p.name for p in trained[1].iterdir()] == ["runs"]


def test_curves_are_a_picture(trained):
    picture = (trained[1] / "runs/digits/curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert 600 <= width <= 3000 and 300 <= height <= 3000
    assert len(picture) > 10_000  # Not an empty canvas.


def test_second_run_says_done(trained):
    folder = trained[1] / "runs/digits"
    before = weights_digest(folder / "model.pkl")
    done = python(*readme_arguments(), cwd=trained[1])
    assert done.returncode == 0, done.stderr
    assert "This run is done: it has 2000 of 2000 steps." in done.stdout
    assert weights_digest(folder / "model.pkl") == before


def test_eval_prints_the_same_accuracy(trained):
    last = measurements(trained[1] / "runs/digits")[-1]
    done = python("-m", "retrax.cli", "eval", "runs/digits", cwd=trained[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "step": 2000,
        "loss": pytest.approx(last["metrics/loss"], abs=1e-6),
        "accuracy": last["metrics/accuracy"],
    }


def test_saved_configuration_alone_gives_the_same_weights(trained, tmp_path):
    source = trained[1] / "runs/digits"
    (tmp_path / "config.gin").write_bytes((source / "config.gin").read_bytes())
    done = python(
        *("-m", "retrax.trainer", "--config_file=config.gin", "--output_dir=again"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    again = weights_digest(tmp_path / "again/model.pkl")
    assert again == weights_digest(source / "model.pkl")


def test_sigterm_saves_and_the_next_run_continues(tmp_path):
    arguments = [*readme_arguments(), "--config=train.steps = 1000000"]
    folder = tmp_path / "runs/digits"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_step(process, folder / "metrics.jsonl", 200)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    message = re.search(r"Interrupted by SIGTERM after step (\d+), saved in (\S+)", err)
    assert message and "same command again" in err
    assert "Traceback" not in err
    step = int(message[1])
    assert storage.load_newest(folder / "model.pkl")[0]["step"] == step
    done = python(*arguments[:-1], f"--config=train.steps = {step + 5}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"at step {step}." in done.stdout
    assert f"{step + 5}: Training done." in done.stdout


def wait_for_step(process, log, step):
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()[1]}")
        if log.exists() and f'"step": {step}, "mode": "eval"' in log.read_text():
            return
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"no step {step} in {LIMIT} s")


def test_own_model_in_an_own_module(tmp_path):
    """The README's my_module.py and my.gin."""
    for name in ("my_module.py", "my.gin"):
        (code,) = re.findall(rf"^```\w+\n(# {name}\n.*?)^```$", README, re.M | re.S)
        (tmp_path / name).write_text(code)
    done = python(
        *("-m", "retrax.cli", "train", "--config_file=my.gin"),
        "--config=train.steps = 2",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert f"trainable weights: {65 * 64 + 65 * 10}" in done.stdout


def test_several_devices_as_the_readme_tries_them(tmp_path):
    (line,) = re.findall(r"^\$ (XLA_FLAGS=.*)$", README, re.MULTILINE)
    flags, _, *arguments = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", "retrax.cli", *arguments, "--config=train.steps = 3"],
        cwd=tmp_path,
        env={**environment(), "XLA_FLAGS": flags.partition("=")[2]},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "training on 2 devices" in done.stdout

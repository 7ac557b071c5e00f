"""runs, plot and compare on files as runs leave them; no training here."""

import json
import os
import platform
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from retrax import cli, storage
from retrax.command_line.parts import compare_parts, first_difference
from retrax.trainer.history import History
from retrax.trainer.run_log import RunLog
from retrax.trainer.run_record import write_record


@pytest.fixture
def command(capsys):
    def run(*argv):
        code = cli.main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def losses(rate, steps):
    return {step: 1 / (1 + rate * step) for step in range(0, steps + 1, 10)}


def payload(step, w=0.0):
    return {
        "kind": "run",
        "step": step,
        "history": History().to_dict(),
        "weights": {"0.Dense/0": np.full((2, 2), step + w), "0.Dense/1": np.ones(2)},
        "slots": ((np.zeros(3),), (np.zeros(2),)),
        "slot_paths": ["0.Dense/0", "0.Dense/1"],
        "gin": f"# {w}",
    }


def make_run(folder, rate=0.1, steps=40, status="done", reason="", shift_at=None):
    """A run as it lies on the disk, with checkpoints of steps 20 and 40."""
    with open(os.devnull, "w") as nowhere:
        log = RunLog(folder, stream=nowhere, tensorboard=False)
        for step, loss in losses(rate, steps).items():
            shift = 0.5 if shift_at is not None and step >= shift_at else 0
            log.scalars("train", step, {"training/steps per second": np.random.rand()})
            log.scalars("train", step, {"metrics/loss": loss + shift})
            values = {"metrics/loss": 2 * loss + shift, "metrics/accuracy": 1 - loss}
            log.scalars("eval", step, values)
        log.close()
    for step in range(20, steps + 1, 20):
        w = 1.0 if shift_at is not None and step >= shift_at else 0.0
        storage.save(folder / f"model_{step}.pkl", payload(step, w))
    (folder / "config.gin").write_text("train.steps = 40\n")
    if status is not None:
        write_record(folder, status, steps, reason)
    return folder


# --- runs -----------------------------------------------------------------------------


def rows(text):
    return {line.split()[0]: line.split() for line in text.splitlines()}


def test_runs_are_listed_with_how_they_ended(tmp_path, command):
    root = tmp_path / "runs"
    make_run(root / "a")
    make_run(root / "deep" / "b", rate=0.5, steps=20, status="failed", reason="no disk")
    make_run(root / "c", steps=10, status="running")  # Its process is no more.
    live = make_run(root / "d", steps=10, status="running")
    (root / "empty").mkdir()
    owner = {"pid": os.getppid(), "host": platform.node(), "since": "today"}
    (live / "run.lock").write_text(json.dumps(owner))
    code, out, _ = command("runs", root)
    assert code == 0
    found = rows(out)
    header = "run status step of time loss best loss accuracy best accuracy"
    assert found["run"] == header.split()
    assert found["a"][1:4] == ["done", "40", "40"]
    assert found["a"][5:] == ["0.4", "0.4", "@40", "0.8", "0.8", "@40"]
    assert found["deep/b"][1:4] == ["failed", "20", "40"]
    assert found["c"][1:3] == ["interrupted", "10"]
    assert found["d"][1:3] == ["running", "10"]
    assert "deep/b: failed: no disk" in out
    assert "c: interrupted: killed" in out
    assert f"d: running: process {os.getppid()}" in out
    assert "empty" not in out


def test_runs_of_a_folder_that_holds_none(tmp_path, command):
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, _, err = command("runs", folder)
        assert code == 2 and str(folder) in err


def test_a_run_without_a_record_or_measurements_is_listed(tmp_path, command):
    storage.save(tmp_path / "x" / "model.pkl", payload(3))
    code, out, _ = command("runs", tmp_path / "x")
    assert code == 0 and "no record of its end" in out


# --- plot -----------------------------------------------------------------------------


def size_of(path):
    data = Path(path).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    return struct.unpack(">II", data[16:24])


def test_curves_of_several_runs_are_one_picture(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", 0.1), ("b", 0.5), ("c", 2.0)):
        make_run(tmp_path / "runs" / name, rate)
    code, out, _ = command("plot", "runs")
    assert code == 0 and out == "runs.png: loss, accuracy of 3 runs\n"
    both = size_of("runs.png")
    code, out, _ = command(
        *("plot", "runs/a", "runs/b", "--metric=accuracy", "--output=one.png")
    )
    assert code == 0 and out == "one.png: accuracy of 2 runs\n"
    assert size_of("one.png")[0] < both[0]


def test_what_cannot_be_drawn_is_told(tmp_path, command):
    make_run(tmp_path / "a")
    code, _, err = command("plot", tmp_path, "--metric=bleu")
    assert code == 2 and "bleu" in err and "loss, accuracy" in err
    (tmp_path / "a" / "metrics.jsonl").unlink()
    code, _, err = command("plot", tmp_path)
    assert code == 2 and "nothing to draw" in err


# --- compare --------------------------------------------------------------------------


def test_equal_runs_are_said_to_be_equal(tmp_path, command):
    a = make_run(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "b")
    code, out, _ = command("compare", a, b)
    assert code == 0
    assert "measurements: 15 values of both runs compared\n  all are equal" in out
    assert "checkpoints: steps 20, 40 compared\n  all are equal" in out


def test_the_step_and_layer_where_runs_part_are_named(tmp_path, command):
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", shift_at=30)
    code, out, _ = command("compare", a, b)
    assert code == 1
    first = losses(0.1, 40)[30]
    assert "first difference is at step 30" in out
    assert f"eval loss: {2 * first!r} against {2 * first + 0.5!r}" in out
    assert "first difference is at step 40 (equal at step 20)" in out
    assert "weights: 0.Dense/0: 4 of 4 numbers, by up to 1" in out
    assert "accuracy" not in out


def test_runs_with_nothing_in_common_cannot_be_compared(tmp_path, command):
    a = make_run(tmp_path / "a")
    storage.save(tmp_path / "b" / "model.pkl", payload(7))
    code, _, err = command("compare", a, tmp_path / "b")
    assert code == 2 and "nothing" in err
    code, _, err = command("compare", a, tmp_path / "c")
    assert code == 2 and "holds no run" in err


def test_a_damaged_checkpoint_is_left_out_and_said(tmp_path, command):
    a = make_run(tmp_path / "a")
    b = shutil.copytree(a, tmp_path / "b")
    (b / "model.pkl").write_bytes(b"nothing")
    code, out, _ = command("compare", a, b)
    assert code == 0 and "left out: " in out and "model.pkl" in out


def test_parts_are_compared_by_bits():
    nan = np.array([np.nan, 1], np.float32)
    other_nan = nan.copy()
    other_nan.view(np.uint32)[0] ^= 1
    same = {"weights": {"0/w": nan}, "n": float("nan"), "kind": "run", "empty": {}}
    assert [c.difference for c in compare_parts(same, dict(same))] == [None, None]
    (found, _) = compare_parts(same, {**same, "weights": {"0/w": other_nan}})
    assert found.part == "weights" and found.difference == "0/w: 1 of 2 numbers"
    pairs = [
        ({"a": 1}, {"a": True}, "a: 1 against True"),
        ({"a": [1, 2]}, {"a": [1]}, "a/1: only in the first"),
        ({}, {"b": 1}, "b: only in the second"),
        (np.float32([1]), np.float64([1]), r"(all): float32(1,) against float64(1,)"),
        (np.zeros(3), np.array([0, 0, -0.0]), "(all): 1 of 3 numbers"),
        (np.array(["a"]), np.array(["b"]), "(all): 1 of 1 numbers"),
    ]
    for a, b, wanted in pairs:
        assert first_difference(a, b) == wanted
    one, two = payload(1), payload(1)
    two["slots"][1][0][:] = 5
    (slots,) = [c for c in compare_parts(one, two) if c.difference]
    assert slots.difference == "0.Dense/1/0: 2 of 2 numbers, by up to 5"

"""Nothing that happens while a checkpoint is written, or to it later, loses a run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrax import storage
from retrax.errors import CheckpointError


def test_every_system_call_may_fail_or_be_the_last(tmp_path):
    script = Path(__file__).with_name("fault_run.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    kinds = {"open", "write", "fsync", "replace", "link", "unlink", "sendfile", "mkdir"}
    assert set(result["counts"]) == kinds
    assert sum(result["counts"].values()) > 250


@pytest.fixture
def two(tmp_path):
    """A small checkpoint of step 2, with that of step 1 before it."""
    path = tmp_path / "model.pkl"
    for step in (1, 2):
        storage.save(path, {"step": step, "w": np.arange(3.0) + step})
    return path


def check_not_loaded(path, number):
    with pytest.raises(CheckpointError):
        storage.load(path)
    if number % 50 == 0:  # Falling back costs more, and is the same each time.
        payload, used = storage.load_newest(path)
        assert used != path and payload["step"] == 1


def test_no_changed_byte_is_loaded(two):
    data = two.read_bytes()
    for place in range(len(data)):
        for mask in (0x01, 0xFF):
            changed = data[place] ^ mask
            two.write_bytes(data[:place] + bytes([changed]) + data[place + 1 :])
            check_not_loaded(two, place)
    two.write_bytes(data)
    assert storage.load(two)["step"] == 2


def test_no_cut_or_lengthened_file_is_loaded(two):
    data = two.read_bytes()
    for length in range(len(data)):
        two.write_bytes(data[:length])
        check_not_loaded(two, length)
    for more in (b"\0", b".", data):
        two.write_bytes(data + more)
        check_not_loaded(two, 0)

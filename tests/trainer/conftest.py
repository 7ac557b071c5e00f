"""What the tests that train in other processes share."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from retrax import storage

SCRIPT = Path(__file__).with_name("dropout_run.py")
LIMIT = 240  # Seconds until a process that does not end is a failure.


class Run:
    """Starts and watches processes that run dropout_run.py in one directory."""

    def __init__(self, folder, cache):
        self.folder = folder
        self._cache = cache  # Of compiled code, shared by all processes.
        self._processes = []

    def start(self, steps, *options):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, self.folder, str(steps), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_COMPILATION_CACHE_DIR": str(self._cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
        )
        self._processes.append(process)
        return process

    def finish(self, process, line=""):
        """Waits for the end; (exit code, what it printed on either stream)."""
        output, errors = process.communicate(line, timeout=LIMIT)
        return process.returncode, output + errors

    def train(self, steps, *options):
        code, text = self.finish(self.start(steps, *options))
        return code, text

    def steps_done(self):
        """Numbers of the steps of all processes so far, in order."""
        path = self.folder / "progress"
        if not path.exists():
            return []
        return [int(line) for line in path.read_text().split("\n")[:-1] if line]

    def wait_for(self, process, is_there):
        """Waits until `is_there()`, as long as the process lives."""
        deadline = time.monotonic() + LIMIT
        while not is_there():
            assert process.poll() is None, self.finish(process)
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def wait_until_stopped(self, process):
        self.wait_for(process, (self.folder / "stopped").exists)
        (self.folder / "stopped").unlink()

    def kill(self, process):
        os.kill(process.pid, signal.SIGKILL)
        assert self.finish(process)[0] == -signal.SIGKILL

    def payload(self, name="model.pkl"):
        return storage.load(self.folder / name)

    def digest(self, name="model.pkl"):
        """sha256 of each part of a checkpoint that a resumed run must repeat."""
        payload = self.payload(name)
        parts = ["step", "weights", "state", "slots", "opt_params", "history"]
        return {part: sha256(payload[part]) for part in [*parts, "data", "run_key"]}

    def close(self):
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def sha256(tree):
    """Hash of plain containers and arrays, by their types, names and bits."""
    digest = hashlib.sha256()

    def add(x):
        if isinstance(x, dict):
            for key in sorted(x):
                digest.update(repr(key).encode())
                add(x[key])
        elif isinstance(x, (list, tuple)):
            digest.update(f"{len(x)} items".encode())
            for item in x:
                add(item)
        elif isinstance(x, np.ndarray):
            digest.update(f"{x.dtype}{x.shape}".encode() + x.tobytes())
        else:
            digest.update(repr(x).encode())

    add(tree)
    return digest.hexdigest()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def run(tmp_path, compiled):
    """A directory to run in, with its processes ended afterwards."""
    run = Run(tmp_path / "run", compiled)
    run.folder.mkdir()
    yield run
    run.close()


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, compiled):
    """A run of 60 steps that nobody interrupted."""
    run = Run(tmp_path_factory.mktemp("whole"), compiled)
    code, text = run.train(60)
    assert code == 0, text
    assert run.steps_done() == list(range(1, 61))
    return run

"""Saves a checkpoint again and again, with one system call failing or fatal each time.

Usage: fault_run.py FOLDER; prints one JSON line: the number of cases of each kind and a
list of what went wrong. Each case is a forked process that saves step 3 in a directory
with steps 1 and 2; the n-th call that changes the disk raises, or kills the process
before or in the middle of it. Then this process, unharmed, loads and saves again.
"""

import collections
import errno
import io
import itertools
import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
from absl import logging

from retrax.errors import CheckpointError
from retrax.storage import atomic
from retrax.trainer.checkpoint_policy import CheckpointPolicy
from retrax.trainer.checkpointer import Checkpointer

CALLS = ("open", "mkdir", "fsync", "replace", "link", "unlink", "sendfile")
MODES = ("fails", "kills before", "kills within")
REAL = {name: getattr(os, name) for name in CALLS}


class Injector:
    """Counts calls; at number `at`, `mode` happens."""

    def __init__(self, at, mode, has_links):
        self.at, self.mode, self.has_links = at, mode, has_links
        self.names = []

    def hit(self, name, half=None):
        self.names.append(name)
        if len(self.names) - 1 != self.at:
            return
        if self.mode != "kills before" and half is not None:
            half()
        if self.mode == "fails":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(self, name):
        def call(*args, **kwargs):
            if name == "link" and not self.has_links:
                raise OSError(errno.EPERM, "no hard links here")
            self.hit(name)
            if name == "fsync":
                return None  # What it does cannot be seen without a power failure.
            result = REAL[name](*args, **kwargs)
            if self.mode == "kills within" and len(self.names) - 1 == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def install(self):
        injector = self

        class RawFile(io.FileIO):
            def write(self, data):
                half = memoryview(data)[: len(data) // 2]
                injector.hit("write", lambda: super(RawFile, self).write(half))
                return super().write(data)

        def opened(path, mode="r", *args, **kwargs):
            if not {"x", "w", "+"} & set(mode):
                return open(path, mode, *args, **kwargs)
            injector.hit("open")
            raw = RawFile(path, mode.replace("b", ""))
            return (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)

        for name in CALLS:
            setattr(os, name, self.wrapped(name))
        atomic.open = shutil.open = opened


def payload(step):
    # Larger than a buffer, so that there are several writes.
    return {
        "kind": "run",
        "step": step,
        "history": {"eval": {"metrics/loss": [(s, -s) for s in range(1, step + 1)]}},
        "w": np.full(6000, step, np.float32),
    }


def checkpointer(folder):
    policy = CheckpointPolicy(keep_last=3, at_steps=[3, 4])
    return Checkpointer(folder, lowest="loss", policy=policy, report=lambda text: None)


def prepare(folder):
    writer = checkpointer(folder)
    for step in (1, 2):
        writer.save(payload(step), keep=False)
    for step in (0, 6):  # More than stay, so that some are removed.
        shutil.copy(folder / "model.pkl", folder / f"recent_{step}.pkl")
    dead = f".model.pkl.{atomic._HOST}.{2**22 + 5}.0.tmp"
    (folder / dead).write_bytes(b"left over")


def save_in_child(folder, injector):
    """Saves step 3 in a fork; returns how that ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 9
    try:
        injector.install()
        checkpointer(folder).save(payload(3), keep=True)
        code = 0
    except CheckpointError:
        code = 1
    finally:
        if injector.mode == "counts":
            (folder / "names").write_text(json.dumps(injector.names))
        os._exit(code)


def loaded(folder):
    """Step of what loads; -1 if its parts do not belong together."""
    found, _ = checkpointer(folder).load()
    want = payload(found["step"])
    same = found["history"] == want["history"] and np.array_equal(found["w"], want["w"])
    return found["step"] if same else -1


def check(folder, name, mode, code):
    """What is wrong after a case, or None."""
    step = loaded(folder)
    if step not in (2, 3):
        return f"step {step} loaded"
    if mode == "fails" and code not in (0, 1):
        return f"raised something else than CheckpointError (exit code {code})"
    if mode != "fails" and code != -signal.SIGKILL:
        return f"was not killed (exit code {code})"
    if mode == "fails" and code == 0 and step != 3:
        return "said that it was saved, and it is not"
    again = checkpointer(folder)
    again.save(payload(4), keep=True)
    if loaded(folder) != 4 or again.failures:
        return f"cannot save again: {again.failures}"
    left = [p.name for p in folder.iterdir() if p.name.endswith(".tmp")]
    stale = [p for p in left if p.startswith(".model.pkl")]
    return f"files are left over: {stale}" if stale else None


def main():
    warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks; none uses it.
    logging.set_verbosity(logging.FATAL)
    root = Path(sys.argv[1])
    template = root / "template"
    template.mkdir()
    os.fsync = lambda descriptor: None  # Not needed here, and slow.
    prepare(template)
    counts, wrong = collections.Counter(), []
    numbers = itertools.count()

    def case(at, mode, has_links):
        folder = root / str(next(numbers))
        shutil.copytree(template, folder)
        code = save_in_child(folder, Injector(at, mode, has_links))
        return folder, code

    for has_links in (True, False):
        folder, code = case(-1, "counts", has_links)
        names = json.loads((folder / "names").read_text())
        if code or loaded(folder) != 3:
            wrong.append(f"without a fault: exit code {code}")
        for mode in MODES:
            for at, name in enumerate(names):
                folder, code = case(at, mode, has_links)
                try:
                    found = check(folder, name, mode, code)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                counts[name] += 1
                if found:
                    wrong.append(f"call {at}, {name} {mode}: {found}")
                shutil.rmtree(folder)
    print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    main()

"""`retrax launch`: one command in several processes on this machine.

For trying out what will run on several hosts. It starts the processes, passes on what
they print, each line with the number of its process, and ends all when one fails.
"""

from __future__ import annotations

import argparse
import collections
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any

from retrax.errors import ConfigError

__all__ = ["run"]

_GRACE_S = 10.0  # For the others to end by themselves.
_KEPT_LINES = 40  # Of an error to be shown again.
_NOISE = re.compile(r"\[Gloo\] Rank |peer ranks|^    @ ")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


def run(args: argparse.Namespace) -> int:
    """Starts the processes; returns the exit code of the first that failed, or 0."""
    command = args.rest[1:] if args.rest[:1] == ["--"] else args.rest
    if not command:
        raise ConfigError(
            "say what to start after --, such as: retrax launch -n 2 -- train "
            "--config_file=digits_mlp.gin --output_dir=run"
        )
    if command[0] != "train":
        raise ConfigError(f"launch starts 'train' only, got {command[0]!r}.")
    if args.num_processes < 1 or (args.devices is not None and args.devices < 1):
        raise ConfigError(
            f"launch needs at least 1 process with 1 device each, got "
            f"-n {args.num_processes} --devices {args.devices}."
        )
    return _Group(command, args.num_processes, args.devices or 1).wait()


class _Group:
    """Processes of one run, and the text that comes from them."""

    def __init__(self, command: list[str], n: int, n_devices: int) -> None:
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._signals: list[int] = []
        self._n_forwarded = 0
        self._last = [collections.deque(maxlen=_KEPT_LINES) for _ in range(n)]
        # Before there is a process to be lost.
        self._before = {
            signum: signal.signal(signum, self._note)
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        address = f"127.0.0.1:{_free_port()}"
        self._children = [
            _start(command, _environment(address, n, i, n_devices)) for i in range(n)
        ]
        self._open = 2 * n  # Streams that text may come from.
        for i, child in enumerate(self._children):
            for stream, is_error in ((child.stdout, False), (child.stderr, True)):
                threading.Thread(
                    target=self._read, args=(i, stream, is_error), daemon=True
                ).start()

    def wait(self) -> int:
        """Passes text on until all have ended; ends all when one fails."""
        try:
            failed = self._run()
        finally:
            for child in self._children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
            for signum, handler in self._before.items():
                signal.signal(signum, handler)
        if failed is None:
            return 0
        code = self._children[failed].returncode
        return 128 - code if code < 0 else code

    def _run(self) -> int | None:
        failed, deadline, held = None, None, []
        while self._open or any(c.poll() is None for c in self._children):
            self._forward_signals()
            try:
                i, line = self._lines.get(timeout=0.05)
            except queue.Empty:
                i, line = -1, ""
            if line is None:
                self._open -= 1
            elif line:
                text = f"[{i}] {line}"
                # What others say of it comes after the error itself.
                if failed is None or i == failed:
                    print(text, flush=True)
                else:
                    held.append(text)
            if failed is None:
                failed = self._first_failed()
                if failed is not None:
                    deadline = time.monotonic() + _GRACE_S
                    self._end_others()
            elif deadline is not None and time.monotonic() > deadline:
                for child in self._children:
                    if child.poll() is None:
                        child.kill()
                deadline = None
        if failed is not None:
            self._tell(failed, held)
        return failed

    def _first_failed(self) -> int | None:
        """The process to blame; one that was killed before those that noticed it."""
        bad = [i for i, c in enumerate(self._children) if c.poll() not in (None, 0)]
        if not bad:
            return None
        return min(bad, key=lambda i: self._children[i].returncode >= 0)

    def _end_others(self) -> None:
        if not self._signals:  # Else they end by themselves, and save.
            for child in self._children:
                if child.poll() is None:
                    child.terminate()

    def _tell(self, failed: int, held: list[str]) -> None:
        code = self._children[failed].returncode
        if self._signals and code == 128 + self._signals[0]:
            how = None  # It was asked to, has saved, and has said so.
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"failed with exit code {code}"
        for text in held:
            print(text)
        if how is None:
            return
        said = "\n".join(f"[{failed}] {line}" for line in self._last[failed])
        said = f"Its last words:\n{said}\n" if said else ""
        hint = "Run the same command again to continue from the last checkpoint."
        print(
            f"\nretrax launch: process {failed} (pid {self._children[failed].pid}) "
            f"{how}, and the others were ended. {said}{hint if code != 2 else ''}",
            file=sys.stderr,
            flush=True,
        )

    def _forward_signals(self) -> None:
        for signum in self._signals[self._n_forwarded :]:
            self._n_forwarded += 1
            insisted = self._n_forwarded > 2
            for child in self._children:
                if child.poll() is None:
                    child.send_signal(signal.SIGKILL if insisted else signum)

    def _note(self, signum: int, frame: Any) -> None:
        del frame
        self._signals.append(signum)

    def _read(self, i: int, stream: IO[str] | None, is_error: bool) -> None:
        assert stream is not None
        for line in stream:
            line = line.rstrip("\n")
            if not line or _NOISE.search(line):
                continue
            if is_error:
                self._last[i].append(line)
            self._lines.put((i, line))
        self._lines.put((i, None))


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    # In sessions of their own: a Ctrl-C comes to us alone, and we pass it on once.
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "retrax.cli", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _environment(address: str, n: int, i: int, n_devices: int) -> dict[str, str]:
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(n),
        "JAX_PROCESS_ID": str(i),
    }
    flags = environment.get("XLA_FLAGS", "")
    flags = re.sub(rf"{_DEVICE_FLAG}=\d+", "", flags).strip()
    environment["XLA_FLAGS"] = f"{flags} {_DEVICE_FLAG}={n_devices}".strip()
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

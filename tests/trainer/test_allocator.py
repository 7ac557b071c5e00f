"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

from retrax.trainer import allocator

SCRIPT = """
import resource
import jax, jax.numpy as jnp
from retrax.trainer import allocator

assert allocator.keep_freed_memory() is True
step = jax.jit(lambda x: x + 1)
x = jnp.ones((5000, 2000))  # 40 MB: glibc would map and unmap it every time.
windows = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(4):
        step(x).block_until_ready()
    windows.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(windows))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_repeated_steps_meet_no_new_pages():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # Without it each of the four steps meets over 9,000 pages of 4 KB.
    assert int(done.stdout) < 1000


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocator.keep_freed_memory() is False

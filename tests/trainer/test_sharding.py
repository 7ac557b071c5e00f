"""Weights cut over devices, against one device that has all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("sharded_run.py")
LIMIT = 240
QUICKLY = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
COMPILES_QUICKLY = True


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, folder / "found.npz", folder / "run"],
        env={**os.environ, **QUICKLY, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(folder / "found.npz") as values:
        return dict(values)


def leaves(found, name):
    n = sum(key.startswith(f"{name}/leaf") for key in found)
    assert n == 11  # Four pairs of weights, and three of state.
    return [found[f"{name}/leaf{i}"] for i in range(n)]


@pytest.mark.parametrize("name", ["whole8", "fsdp4", "tensor", "both"])
def test_any_cut_gives_the_numbers_of_one_device(found, name):
    near = dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[f"{name}/losses"], found["one/losses"], **near)
    np.testing.assert_allclose(
        found[f"{name}/metrics"], found["one/metrics"], rtol=1e-6
    )
    for a, b in zip(leaves(found, name), leaves(found, "one"), strict=True):
        np.testing.assert_allclose(a, b, **near)


@pytest.mark.parametrize(("name", "n"), [("fsdp4", 4), ("whole8", 1)])
def test_each_device_holds_its_part(found, name, n):
    share = found[f"{name}/bytes"] / found[f"{name}/all_bytes"]
    assert 1 / n <= share <= 1 / n + 0.05


def test_tensor_parallel_layers_are_cut(found):
    # Two kernels and a bias by half, the rest whole, or cut by four.
    n_cut, n_rest = 16 * 64 + 64 * 64 + 64, 64 * 2 + 64 + 64 * 8 + 8
    for name, rest in (("tensor", 1), ("both", 1 / 4)):
        share = found[f"{name}/bytes"] / found[f"{name}/all_bytes"]
        wanted = (n_cut / 2 + n_rest * rest) / (n_cut + n_rest)
        np.testing.assert_allclose(share, wanted, rtol=1e-6)


def test_checkpoint_of_cut_weights_goes_on_elsewhere(found):
    np.testing.assert_allclose(
        found["resumed/parts"], found["resumed/whole"], rtol=1e-4, atol=2e-6
    )


def test_a_configuration_cuts_the_weights_of_a_loop(found):
    np.testing.assert_allclose(found["looped/cut"], found["looped/whole"], atol=1e-5)
    assert 0.5 < found["looped/cut_share"] < 0.55 and found["looped/whole_share"] == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unmatched", ["'Attention' matches no weight", "0.Serial/0.Dense"]),
        ("undivided", ["cuts an axis of 64 into 3", "does not divide"]),
        ("axis", ["names 'rows'", "'batch' and 'model'"]),
        ("rank", ["names 2 axes of 1"]),
        ("grid", ["n_model=3 does not divide 4 devices"]),
        ("name", ["'fsdp', or a Sharding", "'zero3'"]),
        ("reduce", ["reduce='mean'", "must be 'weight'"]),
    ],
)
def test_rules_that_cannot_work_are_refused(found, name, words):
    text = str(found[f"refused/{name}"])
    for word in words:
        assert word in text

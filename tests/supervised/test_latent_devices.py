"""Latent thoughts on two devices give the numbers of one: in one process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("latent_devices_run.py")
SPEC = importlib.util.spec_from_file_location(
    "latent_vectors", SCRIPT.with_name("latent_vectors.py")
)
vectors = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(vectors)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "found.json"
    flags = os.environ.get("XLA_FLAGS", "")
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, path],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", vectors.NAMES)
def test_two_devices_compute_the_loss_of_the_vectors(found, name):
    vector = vectors.VECTORS["loss_vectors"][vectors.NAMES.index(name)]
    expected, got = vector["expected"], found[name]
    assert abs(got["norm"] - expected["dtotal_dlogits_l2"]) < 1e-5
    for key in ("total", "ce_loss", "aux_loss", "leak_loss"):
        assert abs(got[key] - expected[key]) < 1e-5, key


def test_two_devices_train_as_one_also_where_rows_do_not_divide(found):
    one, two = np.array(found["trained"][0]), np.array(found["trained"][1])
    np.testing.assert_allclose(two, one, rtol=2e-5, atol=2e-6)
    assert (one[:5] > 1e-2).all()

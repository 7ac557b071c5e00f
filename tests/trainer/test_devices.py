"""Devices on one device; several are in test_several_devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.errors import ConfigError
from retrax.trainer import Devices


def step(carry, shared, batch):
    return carry + shared * jnp.sum(batch), {"sum": jnp.sum(batch)}


def test_one_device_compiles_with_jit():
    devices = Devices(1)
    assert (devices.n, devices.axis, devices.backend) == (1, None, "jit")
    assert Devices().n == len(jax.local_devices())
    fn = devices.compile(step)
    carry, out = fn(devices.put(np.float32(1)), np.float32(2), np.ones(3, "f"))
    assert float(carry) == 7 and float(out["sum"]) == 3


def test_the_carry_is_given_away_only_if_asked():
    devices = Devices(1)
    for donate in (True, False):
        carry = devices.put(np.ones(3, np.float32))
        devices.compile(step, donate)(carry, np.float32(1), np.ones(3, "f"))
        assert carry.is_deleted() == donate


def test_put_and_fetch_copy():
    devices = Devices(1)
    tree = {"w": jnp.arange(3.0), "n": np.arange(2)}
    own = devices.put(tree)
    fetched = devices.fetch(own)
    own["w"].delete()
    np.testing.assert_array_equal(tree["w"], [0, 1, 2])
    np.testing.assert_array_equal(fetched["w"], [0, 1, 2])
    np.testing.assert_array_equal(fetched["n"], [0, 1])
    tree["n"][:] = 9
    np.testing.assert_array_equal(own["n"], [0, 1])


@pytest.mark.parametrize("n", [0, -2, 1.0, True, "2"])
def test_a_number_of_devices_must_be_one(n):
    with pytest.raises(ConfigError, match="positive whole number, got"):
        Devices(n)


def test_more_devices_than_there_are_says_how_to_get_them_on_a_cpu():
    there = len(jax.local_devices())
    expected = (
        rf"n_devices={there + 1} but there are {there}.*"
        rf"XLA_FLAGS=--xla_force_host_platform_device_count={there + 1}"
    )
    with pytest.raises(ConfigError, match=expected):
        Devices(there + 1)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match=r"'shard_map', 'pmap'.*got 'tpu'"):
        Devices(1, "tpu")

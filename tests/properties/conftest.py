"""Every property of every layer compiles something; quick compiling will do."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _without_optimizations():
    """Compiles without optimizations while a test of this folder runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

"""Every property of every layer compiles something; quick compiling will do."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_optimizations():
    """Compiles without optimizations while tests of a module of this folder run.

    What was compiled otherwise is forgotten: results of both kinds differ in the last
    bit, and some properties ask for equal bits.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()

"""Settings shared by all tests: the CPU is enough for every one of them."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_runtest_setup(item):
    """Compiles without optimizations in tests/properties: quick compiling will do.

    What was compiled otherwise is forgotten: results of both kinds differ in the last
    bit, and some tests ask for equal bits.
    """
    import jax

    quickly = "properties" in item.path.parts
    if quickly != getattr(item.session, "compiles_quickly", False):
        item.session.compiles_quickly = quickly
        jax.config.update("jax_disable_most_optimizations", quickly)
        jax.clear_caches()

"""Settings shared by all tests: the CPU is enough for every one of them."""

import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Tests compile the same small programs again and again, in workers and in processes
# that they start. One cache for all of them, for this session only, halves the time.
OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    OWN_CACHE = tempfile.mkdtemp(prefix="retrax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = OWN_CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure():
    """Removes the cache, in the process that made it."""
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def pytest_runtest_setup(item):
    """Compiles without optimizations where quick compiling will do.

    That is in tests/properties, and in modules that say COMPILES_QUICKLY = True. What
    was compiled otherwise is forgotten: results of both kinds differ in the last bit,
    and some tests ask for equal bits.
    """
    import jax

    quickly = "properties" in item.path.parts
    quickly = quickly or getattr(item.module, "COMPILES_QUICKLY", False)
    if quickly != getattr(item.session, "compiles_quickly", False):
        item.session.compiles_quickly = quickly
        jax.config.update("jax_disable_most_optimizations", quickly)
        jax.clear_caches()

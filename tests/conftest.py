"""Settings shared by all tests: the CPU is enough for every one of them."""

import importlib.metadata
import os
import shutil

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# XLA's older emitters of loops, in one module for each program, compile in half of the
# time, and nearly all of the time here is compiling. The part of the tests that runs on
# the newest JAX does without, and so do the wheel's runs in .ci/run.
# Unknown flags end a process, so they are for versions that know them.
QUICK_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):
    given = os.environ.get("XLA_FLAGS", "")
    if QUICK_FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{given} {QUICK_FLAGS}".strip()

LONG = {"test_hosts", "test_launch", "test_several_devices", "test_sequence_tasks"}
MAX_CACHE_BYTES = 2 << 30


def pytest_configure(config):
    """Keeps compiled programs for workers, for their processes, and for next time.

    Tests compile the same small programs again and again. What a program is compiled
    from is its key, so no change of the code meets an old one.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = config.cache.mkdir("compiled")
    if sum(file.stat().st_size for file in folder.iterdir()) > MAX_CACHE_BYTES:
        shutil.rmtree(folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


# Here compiling costs more than running, and quick compiling will do.
QUICKLY = {"layers", "models", "optimizers", "properties"}


def pytest_collection_modifyitems(items):
    """Begins with what takes long, so that it is not left for last."""
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_runtest_setup(item):
    """Compiles without optimizations in some folders, but for tests marked `optimized`.

    A module elsewhere asks for it by COMPILES_QUICKLY = True.
    What was compiled otherwise is forgotten: results of both kinds differ in the last
    bit, and some tests ask for equal bits.
    """
    import jax

    quickly = bool(QUICKLY & set(item.path.parts))
    quickly |= getattr(item.module, "COMPILES_QUICKLY", False)
    quickly &= item.get_closest_marker("optimized") is None
    if quickly != getattr(item.session, "compiles_quickly", False):
        item.session.compiles_quickly = quickly
        jax.config.update("jax_disable_most_optimizations", quickly)
        jax.clear_caches()

"""Settings shared by all tests: the CPU is enough for every one of them."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

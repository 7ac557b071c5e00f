"""Time of `import retrax` against `import jax`, each in fresh processes, in turn.

Prints one JSON line: median seconds of each, and the median of the ratios of pairs.
Goal: `import retrax` at most 1.3 times `import jax`.

usage: python benchmarks/import_time.py [--runs N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

STATEMENTS = {
    "jax": "import jax",
    "retrax": "import retrax",
    "retrax_layers": "from retrax import layers",
    "retrax_trainer": "from retrax import trainer",
}


def seconds(statement: str) -> float:
    """Runs a statement in a new interpreter; returns wall-clock seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measures in turn, so that a machine that slows down slows all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    for statement in STATEMENTS.values():  # Compile and cache files first.
        seconds(statement)
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(args.runs):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    result = {
        "benchmark": "import_time",
        "seconds": {n: round(statistics.median(t), 3) for n, t in times.items()},
        "ratio_to_jax": {
            n: round(
                statistics.median(a / b for a, b in zip(t, times["jax"], strict=True)),
                3,
            )
            for n, t in times.items()
            if n != "jax"
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

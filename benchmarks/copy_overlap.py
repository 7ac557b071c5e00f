"""How much of the copying of layer-by-layer training goes on beside the computation.

Records a step of `ReversibleSerialTrainer` with the profiler of JAX, and prints a JSON
line: milliseconds of putting values on the device, of computation, and of both at once.
For a CPU, where these are `DevicePutWithSharding` and `ThunkExecutor::Execute` in a
trace. What goes back to the host is not copied there, as it is in the same memory.

usage: python benchmarks/copy_overlap.py [--layers 6 --rows 2048 --width 768]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
from memory_depth import trainers

Spans = list[tuple[float, float]]


def main() -> None:
    """Traces as many steps as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    _, trainer, batch = trainers(args.layers, args.rows, args.width)
    trainer.one_step(batch, jax.random.key(0))
    for _ in range(args.rounds):
        copied, computed = traced(trainer, batch)
        both = ms(common(copied, computed))
        row = {
            "put_ms": ms(copied),
            "computed_ms": ms(computed),
            "beside_ms": both,
            "share_beside": round(both / ms(copied), 2),
        }
        print(json.dumps({"benchmark": "copy_overlap", **row}))


def traced(trainer: Any, batch: Any) -> tuple[Spans, Spans]:
    """Returns when a step put values on the device, and when it computed, in ns."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as place:
        with jax.profiler.trace(place, profiler_options=options):
            loss = trainer.one_step(batch, jax.random.key(0))[0]
            jax.block_until_ready(loss)
        (path,) = Path(place).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    copied: Spans = []
    computed: Spans = []
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                span = (event.start_ns, event.start_ns + event.duration_ns)
                if event.name in ("DevicePutWithSharding", "H2D Dispatch"):
                    copied.append(span)
                elif event.name.startswith("ThunkExecutor::Execute"):
                    computed.append(span)
    return union(copied), union(computed)


def union(spans: Spans) -> Spans:
    """Joins spans that meet; the result is sorted."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def common(a: Spans, b: Spans) -> Spans:
    """What lies in a span of both."""
    meets = [(max(s, t), min(e, f)) for s, e in a for t, f in b]
    return [(start, end) for start, end in meets if start < end]


def ms(spans: Spans) -> float:
    """Milliseconds of spans that do not meet."""
    return round(sum(end - start for start, end in spans) / 1e6, 2)


if __name__ == "__main__":
    main()

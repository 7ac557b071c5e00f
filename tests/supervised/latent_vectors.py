"""The golden vectors of latent thoughts, as arrays; used by several tests."""

import functools
import json
from pathlib import Path

import numpy as np

PATH = Path(__file__).parents[1] / "data" / "vectors" / "latent_public.json"
VECTORS = json.loads(PATH.read_text())
NAMES = [v["name"] for v in VECTORS["loss_vectors"]]


def by_formula(formula):
    """float32(amp * sin(sum of coef[k] * index_k)), float64 inside."""
    indices = np.indices(formula["shape"]).astype(np.float64)
    angle = np.tensordot(np.array(formula["coef"]), indices, 1)
    return (formula["amp"] * np.sin(angle)).astype(np.float32)


@functools.cache
def arrays(name):
    """Returns (tokens, start_index, levels, cand_targets, logits, cand_logits)."""
    given = VECTORS["inputs"][name]
    n, k = given["n"], given["K"]
    logits = given.get("logits")
    cand_logits = given.get("cand_logits")
    if logits is None:
        logits = by_formula(given["logits_formula"])
        cand_logits = by_formula(given["cand_logits_formula"])
    logits = np.array(logits, np.float32)
    n_draws, n_rows = logits.shape[:2]
    return (
        np.array(given["tokens"], np.int32),
        np.array(given["start_index"], np.int32),
        np.array(given["levels"], np.int32),
        np.array(given["cand_targets"], np.int32).reshape(n_rows, k, n * n),
        logits,
        np.array(cand_logits, np.float32).reshape(n_draws, n_rows, k, n * n, n),
    )

"""Models: compositions of layers only."""

from retrax.models.mlp import MLP

__all__ = ["MLP"]

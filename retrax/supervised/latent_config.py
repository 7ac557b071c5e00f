"""`LatentConfig`: how a model thinks in latent vectors, and what it is trained on.

First of the latent modules of `retrax.supervised`; needs errors only.
"""

from __future__ import annotations

import dataclasses

import gin

from retrax.errors import ConfigError

__all__ = ["MODES", "OBJECTIVES", "LatentConfig"]

MODES = ("level", "depth")
OBJECTIVES = ("mean", "min")


@gin.configurable(module="retrax.supervised.latent")
@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """All settings of latent thoughts and of their loss.

    Attributes:
      num_passes: thoughts built one after the other, each by a run of the model; None
        for one for each slot.
      mode: which slots a row may use: 'level': as many as its level says; 'depth': as
        many as there are passes.
      prefix_length: tokens that thoughts are built from, at least those of the clues
        and placeholders of each puzzle; None for the whole sequence. They see nothing
        of what comes later, so a shorter prefix only saves time.
      shared_prefix: the first tokens, which are clues in every puzzle: 3 times the
        fewest clues. With it thoughts and answer come in one run of the model, which
        keeps keys and values, with the same values. It needs a model without dropout;
        not with noise. None runs the model once for each thought and once more.
      trunc: gradients go back through so many of the last passes; 0 for all.
      noise: whether thoughts are random; needs a model with a noise head.
      n_draws: with noise, how many draws each batch is computed for.
      objective: with several draws, their 'mean' loss or the 'min' of them.
      loc_weight: weight of the cross-entropy of rows and columns.
      value_weight: weight of the cross-entropy of values.
      supervise_first: also train the row of the first empty cell, which comes right
        after the last placeholder. Decoding needs that prediction.
      leak_weight: weight of the probability that leaks out of the candidate sets.
      inst_slot: the slot whose candidates values are held against; below 0 that of the
        last pass.
      aux_weight: weight of the loss of the candidate head; 0 skips it.
      pos_weight: weight of possible digits in it.
      delta_bg: weight of cells whose candidates are those of the stage before.
      backtrack: train the candidate head alone, and at each row's last slot only.

    Raises:
      ConfigError: a setting is unknown or out of range; says which.
    """

    num_passes: int | None = None
    mode: str = "level"
    prefix_length: int | None = None
    shared_prefix: int | None = None
    trunc: int = 0
    noise: bool = False
    n_draws: int = 1
    objective: str = "mean"
    loc_weight: float = 1.0
    value_weight: float = 1.0
    supervise_first: bool = False
    leak_weight: float = 0.0
    inst_slot: int = -1
    aux_weight: float = 1.0
    pos_weight: float = 5.0
    delta_bg: float = 1.0
    backtrack: bool = False

    def __post_init__(self) -> None:
        """Checks what does not depend on a model."""
        for name, value, known in (
            ("mode", self.mode, MODES),
            ("objective", self.objective, OBJECTIVES),
        ):
            if value not in known:
                raise ConfigError(
                    f"{name} of latent thoughts must be one of {known}, got {value!r}."
                )
        counts = {"num_passes": self.num_passes or 0, "trunc": self.trunc}
        for name, value in counts.items():
            if value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}.")
        positive = {
            "n_draws": self.n_draws,
            "prefix_length": self.prefix_length,
            "shared_prefix": self.shared_prefix,
        }
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.shared_prefix is None:
            return
        if self.noise:
            raise ConfigError(
                f"shared_prefix={self.shared_prefix} builds thoughts in one run, which "
                "cannot be random; leave it out, or set noise=False."
            )
        if self.prefix_length and self.prefix_length <= self.shared_prefix:
            raise ConfigError(
                f"shared_prefix={self.shared_prefix} are the tokens of the fewest "
                f"clues, prefix_length={self.prefix_length} those of the most with "
                "their placeholders, so that must be more."
            )

    def passes(self, n_latents: int) -> int:
        """Returns the number of passes for a model of so many slots.

        Raises:
          ConfigError: there are more passes than slots, or a loss needs slots and there
            are none.
        """
        passes = n_latents if self.num_passes is None else self.num_passes
        if passes > n_latents:
            raise ConfigError(
                f"num_passes={passes}, but there are only {n_latents} slots for latent "
                "thoughts (n_latents of the data); a pass fills one slot."
            )
        if self.leak_weight > 0 and not n_latents:
            raise ConfigError(
                f"leak_weight={self.leak_weight} holds values against candidate sets, "
                "but with n_latents=0 the batches have none; set leak_weight=0."
            )
        if self.noise and not n_latents:
            raise ConfigError("noise=True makes thoughts random, but n_latents is 0.")
        return passes

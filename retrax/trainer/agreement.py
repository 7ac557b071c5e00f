"""What the processes of a run agree on while it runs: signals, ends, equal weights.

`Session` holds one. A signal reaches one process, or each at another step, but all must
end after the same one; so they look together, about once a second. With one process
nothing has to be agreed on.
"""

from __future__ import annotations

import io
import time
from typing import Any

import gin

from retrax.errors import ConfigError
from retrax.layers import tree as layer_tree
from retrax.trainer import hosts

__all__ = ["Agreement", "Silence"]

_LOOK_EVERY_S = 1.0
_MAX_STEPS = 1000


class Silence(io.StringIO):
    """A stream that nothing comes out of, for processes that are not the first."""

    def write(self, text: str) -> int:
        return len(text)


@gin.configurable(module="retrax.trainer")
class Agreement:
    """Looks at what the processes of a run have to agree on, after each step."""

    def __init__(self, check_every: int = 1000) -> None:
        """Makes one, and compares the configurations of the processes.

        Args:
          check_every: steps after which the weights of all processes are compared, as
            they are when a run begins.

        Raises:
          ConfigError: it is no positive whole number, or configurations differ.
        """
        if type(check_every) is not int or check_every < 1:
            raise ConfigError(
                f"Agreement: check_every must be a whole number of at least 1, got "
                f"{check_every!r}."
            )
        if hosts.count() > 1:
            hosts.check_equal("the configuration", gin.config_str())
        self._check_every = check_every
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._next, self._ahead = step + 1, 1
        self._seen = (step, time.monotonic())

    def begin(self, step: int, step_trainers: list[Any]) -> None:
        """Compares weights when a run begins, at the step it is at.

        Raises:
          HostError: they differ; names the processes and the first weight.
        """
        self._begin(step)
        check_weights(step_trainers)

    def look(
        self, step: int, signum: int | None, wish: bool, step_trainers: list[Any]
    ) -> tuple[int | None, bool]:
        """Returns (signal that came to any process, whether any wishes to stop).

        Every process calls it after every step; most calls do nothing.

        Raises:
          HostError: weights differ; names the processes and the first weight.
        """
        if hosts.count() == 1:
            return signum, wish
        if step % self._check_every == 0:
            check_weights(step_trainers)
        if step < self._next:
            return None, False
        before, since = self._seen
        now = time.monotonic()
        each = (now - since) / max(step - before, 1)
        # At first steps are slow or fast for reasons of their own.
        most = min(2 * self._ahead, _MAX_STEPS)
        ahead = min(max(int(_LOOK_EVERY_S / max(each, 1e-6)), 1), most)
        seen = hosts.gathered([signum or 0, int(wish), ahead])
        # Steps take the same time everywhere, but all must take the same number.
        self._ahead = int(seen[0, 2])
        self._next, self._seen = step + self._ahead, (step, now)
        signals = [int(x) for x in seen[:, 0] if x]
        return (signals[0] if signals else None), bool(seen[:, 1].any())


def check_weights(step_trainers: list[Any]) -> None:
    """Compares the weights that several processes train; see `Agreement.begin`."""
    if hosts.count() == 1:
        return
    for trainer in step_trainers:
        layer, weights = trainer.model_with_loss, trainer.carry.weights
        hosts.check_same_weights(layer_tree.named_leaves(layer, weights))

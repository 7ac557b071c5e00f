"""What a model needs: memory in each way of training it, time; how well it reverses.

`report` measures, `draw` makes a picture of the data stack. `retrax inspect` has both.
Above all other ways to train, which it asks for what they would need.
"""

from retrax.trainer.inspect.costs import Cost
from retrax.trainer.inspect.picture import draw
from retrax.trainer.inspect.reporting import Report, as_bytes, report
from retrax.trainer.inspect.reversal import Reversal
from retrax.trainer.inspect.totals import MODES, Total
from retrax.trainer.inspect.walk import Visit

__all__ = [
    "MODES",
    "Cost",
    "Report",
    "Reversal",
    "Total",
    "Visit",
    "as_bytes",
    "draw",
    "report",
]

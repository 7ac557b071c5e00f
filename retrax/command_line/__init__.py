"""What the commands do; `retrax.cli` parses their arguments."""

__all__: list[str] = []

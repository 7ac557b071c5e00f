# What pyright cannot infer of gin-config: its decorators keep the wrapped type.
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

F = TypeVar("F")

REQUIRED: Any

@overload
def configurable(name_or_fn: F, /) -> F: ...
@overload
def configurable(
    name_or_fn: str | None = ...,
    module: str | None = ...,
    allowlist: Sequence[str] | None = ...,
    denylist: Sequence[str] | None = ...,
) -> Callable[[F], F]: ...
def __getattr__(name: str) -> Any: ...

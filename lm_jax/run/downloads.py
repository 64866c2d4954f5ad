"""Whether a model that is not on this machine may be downloaded: never, unless the user asks.

A command asks with `--download` (`lm_jax.console.cli`), a program with `download=True` of
`lm_jax.load_pretrained` or with `allowed`.
"""

from collections.abc import Iterator
import contextlib
import contextvars

_ALLOWED = contextvars.ContextVar("downloads", default=False)


@contextlib.contextmanager
def allowed(asked: bool) -> Iterator[None]:
    """Allows downloads inside the block, where they are asked for."""
    before = _ALLOWED.set(asked or _ALLOWED.get())
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def are_allowed() -> bool:
    """True where a download was asked for."""
    return _ALLOWED.get()

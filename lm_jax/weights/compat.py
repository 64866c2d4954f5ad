"""The one place that imports `transformers`.

It has advice for its own users: that there is no PyTorch, whose models we do not use, or that
a config names tokens that its vocabulary lacks, which we check where it matters. Its log therefore
begins at errors, unless TRANSFORMERS_VERBOSITY says otherwise.
"""

from collections.abc import Iterator
import contextlib
import os
import sys
from types import ModuleType

_VERBOSITY = "TRANSFORMERS_VERBOSITY"


def transformers() -> ModuleType:
    """Imports `transformers` without its advice.

    Raises:
        ImportError: `transformers` is not installed.
    """
    with _errors_alone():
        import transformers
    return transformers


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    # The log's level is read from the environment when the package is imported.
    if _VERBOSITY in os.environ or "transformers" in sys.modules:
        yield
        return
    os.environ[_VERBOSITY] = "error"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]

"""The one place that imports `transformers`, whatever else is installed beside it.

`transformers` looks for the Hugging Face package `kernels` by distribution name and then imports
names from whichever package `kernels` comes first on the path. With both that distribution and our
`kernels` folder present, the names are missing and no model, sometimes no tokenizer, can be loaded.

It also has advice for its own users: that there is no PyTorch, whose models we do not use, or that
a config names tokens that its vocabulary lacks, which we check where it matters. Its log therefore
begins at errors, unless TRANSFORMERS_VERBOSITY says otherwise.
"""

from collections.abc import Iterator
import contextlib
import importlib.metadata
import os
import sys
from types import ModuleType

_VERBOSITY = "TRANSFORMERS_VERBOSITY"


def transformers() -> ModuleType:
    """Imports `transformers`, with its probe for hub kernels off if that distribution is installed.

    Raises:
        ImportError: `transformers` is not installed.
    """
    with _errors_alone():
        import transformers

    if any(importlib.metadata.distributions(name="kernels")):
        import transformers.utils
        from transformers.utils import import_utils

        # transformers loads its modules lazily and each asks one of these two names on import.
        for module in (transformers.utils, import_utils):
            module.is_kernels_available = _no_kernels
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


def _no_kernels(*args: object, **kwargs: object) -> bool:
    return False

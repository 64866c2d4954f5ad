"""The one place that imports `transformers`, whatever else is installed beside it.

`transformers` looks for the Hugging Face package `kernels` by distribution name and then imports
names from whichever package `kernels` comes first on the path. With both that distribution and our
`kernels` folder present, the names are missing and no model, sometimes no tokenizer, can be loaded.
"""

import importlib.metadata
from types import ModuleType


def transformers() -> ModuleType:
    """Imports `transformers`, with its probe for hub kernels off if that distribution is installed.

    Raises:
        ImportError: `transformers` is not installed.
    """
    import transformers

    if any(importlib.metadata.distributions(name="kernels")):
        import transformers.utils
        from transformers.utils import import_utils

        # transformers loads its modules lazily and each asks one of these two names on import.
        for module in (transformers.utils, import_utils):
            module.is_kernels_available = _no_kernels
    return transformers


def _no_kernels(*args: object, **kwargs: object) -> bool:
    return False

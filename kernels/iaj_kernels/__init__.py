"""GPU kernels and their plain-JAX implementations: one public function per operation.

The folder `kernels` holds this package as a folder `src` would: a package that is imported as
`kernels` would collide with the one of Hugging Face, which `transformers` looks for. Importing it
does not start jax: an operation is imported on first use of its name (PEP 562).

An operation `op` lives in the folder `op` beside this file, and `iaj_kernels.op` is always its
public function. Modules of the folder are reached as `from iaj_kernels.op import reference`.
"""

import importlib
import sys
import types

# Public function -> module that defines it, "prefix_mean": "iaj_kernels.prefix_mean.api".
_EXPORTS = {
    "delta_rule": "iaj_kernels.delta_rule.api",
    "gated_attention": "iaj_kernels.gated_attention.api",
    "gated_slots": "iaj_kernels.gated_slots.api",
    "prefix_mean": "iaj_kernels.prefix_mean.api",
    "row_map_attention": "iaj_kernels.row_map_attention.api",
    "score_stats": "iaj_kernels.score_stats.api",
    "selective_scan": "iaj_kernels.selective_scan.api",
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


class _Package(types.ModuleType):
    """A module whose public names stay functions when the folders of that name are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _EXPORTS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

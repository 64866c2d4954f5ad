"""GPU kernels and their plain-JAX implementations: one public function per operation.

`transformers` probes any importable package of this name, so importing it must never fail, must not
start jax, and must show a version outside the range of the Hugging Face package `kernels`. Hence:
standard library only, and an operation is imported on first use of its name (PEP 562).

An operation `op` lives in the folder `kernels/op`, and `kernels.op` is always its public function.
Modules of the folder are reached as `from kernels.op import reference`.
"""

import importlib
import sys
import types

# transformers accepts the other package from 0.18.2 on.
__version__ = "0.0.0"

# Public function -> module that defines it, "prefix_mean": "kernels.prefix_mean.api".
_EXPORTS = {
    "delta_rule": "kernels.delta_rule.api",
    "gated_attention": "kernels.gated_attention.api",
    "gated_slots": "kernels.gated_slots.api",
    "prefix_mean": "kernels.prefix_mean.api",
    "row_map_attention": "kernels.row_map_attention.api",
    "score_stats": "kernels.score_stats.api",
    "selective_scan": "kernels.selective_scan.api",
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

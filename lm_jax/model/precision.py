"""Products of float32 that are float32: the switch between measuring and training.

JAX's default precision of a matrix product is that of the fastest unit of the device: on an A100
and later GPUs, and on TPUs, the operands of float32 products are rounded to 10 bits (TF32) or 7
(bfloat16). That suits training, which keeps it. A measurement is compared with others, with float64
and with other libraries, so it is made with the products that its dtype says:

    @exact_jit                                      in place of jax.jit
    with exact_products():                          around code that is not compiled as a whole

Every compiled program of the libraries that measures is made by `exact_jit`; those that train,
initialise, generate text or hold no product are made by `jax.jit`, and tests/test_precision.py
lists them. The precision is part of the key of JAX's caches, so that one function can be compiled
both ways. On CPUs both are the same, and bfloat16 operands are exact either way.
"""

from collections.abc import Callable
import contextlib
import functools
from typing import Any

import jax

PRECISION = "highest"


def exact_products() -> contextlib.AbstractContextManager[Any]:
    """Context in which float32 products are not rounded to TF32 or bfloat16."""
    return jax.default_matmul_precision(PRECISION)


def with_exact_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, called or traced with exact products, whatever the caller's precision."""

    @functools.wraps(fn)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with exact_products():
            return fn(*args, **kwargs)

    return exact


def exact_jit(fn: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a function that measures; `options` are those of `jax.jit`."""
    return jax.jit(with_exact_products(fn), **options)

"""Programs to time: our implementations, and baselines of the same or of dense operations.

A program is a function `(case, arrays) -> outputs`, a dict of arrays, on the arrays of the
operation's suite. `forward` and `gradient` make it a function of its arguments alone.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import types
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.core import cases
from iaj_kernels.prefix_mean import baselines
from iaj_kernels.suites import SUITES
from tools.bench import timing
from tools.bench.in_torch.libraries import FLA, MAMBA

Program = Callable[[cases.Case, cases.Arrays], dict[str, jax.Array]]
Timed = tuple[Callable[..., Any], tuple[Any, ...]]


def ours(op: str, implementation: str | None) -> Program:
    """An implementation of the operation itself."""
    suite = SUITES[op]
    return lambda case, arrays: suite.call(case, arrays, implementation)


def dense_attention(implementation: Literal["cudnn", "xla"]) -> Program:
    """Causal softmax attention on the same q, k, v, by `jax.nn.dot_product_attention`."""

    def call(_case: cases.Case, arrays: cases.Arrays) -> dict[str, jax.Array]:
        q_BTNH, k_BSKH = arrays["q"], arrays["k"]
        v_BSKH = arrays.get("v", k_BSKH)
        return {
            "out": jax.nn.dot_product_attention(
                q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation=implementation
            )
        }

    return call


def heads_of_width(arrays: cases.Arrays, width: int, head_width: int) -> cases.Arrays:
    """q, k and v of as many tokens as a prefix mean, in a model of `width`."""
    B, T, E = arrays["value"].shape
    x_BTD = jnp.tile(arrays["value"], (1, 1, -(-width // E)))[..., :width]
    x_BTNH = x_BTD.reshape(B, T, width // head_width, head_width)
    return {"q": x_BTNH, "k": x_BTNH + 1, "v": x_BTNH}


BASELINES: Mapping[str, Callable[[str], Program]] = types.MappingProxyType(
    {
        "reference": lambda op: ours(op, "reference"),
        "xla": lambda op: ours(op, "xla"),
        "materialised": lambda _op: baselines.materialised_call,
        "cudnn": lambda _op: dense_attention("cudnn"),
        "dense_xla": lambda _op: dense_attention("xla"),
        "cudnn_width_512": lambda _op: dense_attention("cudnn"),
    }
)

# The arrays of baselines that do not read those of the operation, made before anything is timed.
INPUTS: Mapping[str, Callable[[cases.Arrays], cases.Arrays]] = types.MappingProxyType(
    {"cudnn_width_512": functools.partial(heads_of_width, width=512, head_width=64)}
)


@dataclasses.dataclass(frozen=True)
class Outside:
    """A baseline that is no JAX program, and may not be installed.

    Attributes:
      missing: function that returns what to install, or "" if it can run.
      program: `(what, suite, case, arrays, copies)`, as `timing.program` returns.
    """

    missing: Callable[[], str]
    program: Callable[[str, cases.Suite, cases.Case, cases.Arrays, int], timing.Program]


OUTSIDE: Mapping[str, Outside] = types.MappingProxyType(
    {
        "fla": Outside(FLA.missing, FLA.program),
        "mamba_ssm": Outside(MAMBA.missing, MAMBA.program),
    }
)


def forward(program: Program, case: cases.Case, arrays: cases.Arrays) -> Timed:
    """The program's outputs as a function of the arrays."""
    return (lambda arrays: program(case, arrays)), (arrays,)


def gradient(program: Program, suite: cases.Suite, case: cases.Case, arrays: cases.Arrays) -> Timed:
    """The program's outputs, and `d_<argument>` for a random cotangent of each floating one.

    Both are returned, or XLA would omit parts of the forward pass that the backward does not need.
    """
    shapes = jax.eval_shape(lambda arrays: program(case, arrays), arrays)
    floating = [name for name, out in shapes.items() if jnp.issubdtype(out.dtype, jnp.floating)]
    keys = jax.random.split(jax.random.key(1), len(floating))
    cotangents = {
        name: jax.random.normal(key, shapes[name].shape).astype(shapes[name].dtype)
        for name, key in zip(floating, keys, strict=True)
    }
    moving = [name for name in suite.differentiable if name in arrays]

    def run(arrays: cases.Arrays, cotangents: cases.Arrays) -> cases.Arrays:
        def outputs(moving: cases.Arrays) -> cases.Arrays:
            return program(case, {**arrays, **moving})

        values, pull = jax.vjp(outputs, {name: arrays[name] for name in moving})
        (gradients,) = pull(
            {
                name: cotangents.get(name, np.zeros(x.shape, jax.dtypes.float0))
                for name, x in values.items()
            }
        )
        return {**values, **{f"d_{name}": x for name, x in gradients.items()}}

    return run, (arrays, cotangents)

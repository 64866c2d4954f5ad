"""Workloads of `selective_scan`: small test cases, and the Mamba baseline's sizes to time."""

import jax
import jax.numpy as jnp

from iaj_kernels.core.cases import Arrays, Case, Suite
from iaj_kernels.selective_scan.api import IMPLEMENTATIONS, selective_scan


def _case(B: int, T: int, I: int, J: int, dtype: str, uses, **options) -> Case:  # noqa: E741
    text = "".join(f"_{name}" for name in options)
    name = f"b{B}_t{T}_i{I}_j{J}_{dtype}{text}"
    return Case(name, {"B": B, "T": T, "I": I, "J": J}, dtype, options, frozenset(uses))


CASES = (
    *(_case(2, T, 24, 16, "float32", {"test"}) for T in (1, 2, 63, 64, 65, 200)),
    _case(2, 130, 24, 16, "bfloat16", {"test"}),
    _case(2, 65, 24, 16, "float32", {"test"}, initial_state=True),
    _case(2, 65, 24, 16, "float32", {"test"}, decay=(1e-4, 50.0)),
    _case(2, 65, 24, 16, "float32", {"test"}, skip=False),
    _case(8, 256, 512, 16, "float32", {"cpu"}),
    _case(1, 2048, 512, 16, "float32", {"cpu"}),
    _case(32, 256, 512, 16, "bfloat16", {"gpu", "budget"}),
    _case(1, 32_768, 512, 16, "bfloat16", {"gpu"}),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Step sizes and rates as Mamba initialises them: delta in [0.001, 0.1], A = -1 .. -J.

    With `decay=(least, most)` every delta is 1 and -A is spread evenly in its logarithm.
    """
    B, T, I, J = (case.sizes[letter] for letter in "BTIJ")  # noqa: E741
    keys = jax.random.split(key, 6)
    log_delta_BTI = jax.random.uniform(keys[1], (B, T, I), minval=-6.9, maxval=-2.3)
    delta_BTI = jnp.exp(log_delta_BTI)
    A_IJ = -jnp.tile(jnp.arange(1.0, J + 1.0)[None], (I, 1))
    if "decay" in case.options:
        least, most = case.options["decay"]
        delta_BTI = jnp.ones((B, T, I))
        A_IJ = -jnp.exp(jnp.linspace(jnp.log(least), jnp.log(most), I * J)).reshape(I, J)
    arrays = {
        "u": jax.random.normal(keys[0], (B, T, I)).astype(case.dtype),
        "delta": delta_BTI.astype(case.dtype),
        "A": A_IJ,
        "B": jax.random.normal(keys[2], (B, T, J)).astype(case.dtype),
        "C": jax.random.normal(keys[3], (B, T, J)).astype(case.dtype),
    }
    if case.options.get("skip", True):
        arrays["D"] = jax.random.normal(keys[4], (I,))
    if case.options.get("initial_state"):
        arrays["state"] = jax.random.normal(keys[5], (B, I, J))
    return arrays


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """The output and the state after the last step."""
    y_BTI, state_BIJ = selective_scan(
        arrays["u"],
        arrays["delta"],
        arrays["A"],
        arrays["B"],
        arrays["C"],
        arrays.get("D"),
        initial_state=arrays.get("state"),
        return_state=True,
        implementation=implementation,
    )
    return {"y": y_BTI, "end": state_BIJ}


SUITE = Suite(
    op="selective_scan",
    cases=CASES,
    make=make,
    call=call,
    differentiable=("u", "delta", "A", "B", "C", "D", "state"),
    implementations=tuple(IMPLEMENTATIONS),
)

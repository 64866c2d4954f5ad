"""Workloads of `delta_rule`: small test cases, and the DeltaNet baseline's sizes to time."""

import jax
import jax.numpy as jnp

from iaj_kernels.core.cases import Arrays, Case, Suite
from iaj_kernels.delta_rule.api import IMPLEMENTATIONS, delta_rule


def _case(B: int, T: int, N: int, H: int, E: int, dtype: str, uses, **options) -> Case:
    text = "".join(f"_{name}{value}" for name, value in options.items())
    name = f"b{B}_t{T}_n{N}_h{H}_e{E}_{dtype}{text}"
    sizes = {"B": B, "T": T, "N": N, "H": H, "E": E}
    return Case(name, sizes, dtype, options, frozenset(uses))


CASES = (
    *(_case(2, T, 2, 16, 24, "float32", {"test"}) for T in (1, 2, 63, 64, 65, 200)),
    _case(2, 130, 2, 16, 24, "bfloat16", {"test"}),
    _case(2, 65, 2, 16, 24, "float32", {"test"}, initial_state=True),
    *(_case(2, 65, 2, 16, 24, "float32", {"test"}, beta=beta) for beta in (0.0, 1.0, 2.0)),
    *(_case(2, 65, 2, 16, 24, "float32", {"test"}, keys="same", beta=b) for b in (0.5, 1.0, 2.0)),
    *(_case(2, T, 2, 16, 24, "float32", {"test"}, decay=0.3) for T in (1, 63, 65, 200)),
    _case(2, 65, 2, 16, 24, "float32", {"test"}, decay=60.0, initial_state=True),
    _case(2, 65, 2, 16, 24, "bfloat16", {"test"}, decay=0.3),
    # Long enough for the GPU's kernels to cut a row into segments.
    _case(1, 2048, 1, 16, 24, "float32", {"test"}),
    _case(1, 2100, 1, 16, 24, "float32", {"test"}, decay=0.01, initial_state=True),
    _case(8, 256, 4, 64, 64, "float32", {"cpu", "budget"}),
    _case(1, 2048, 4, 64, 64, "float32", {"cpu"}),
    _case(32, 256, 4, 64, 64, "bfloat16", {"gpu", "budget"}),
    _case(1, 32_768, 4, 64, 64, "bfloat16", {"gpu"}),
    _case(8, 2048, 4, 128, 128, "bfloat16", {"gpu", "budget"}),
    # Gated DeltaNet: long rows of few heads, and rows of training.
    _case(1, 32_768, 4, 64, 64, "bfloat16", {"gpu"}, decay=0.02),
    _case(1, 32_768, 8, 128, 128, "bfloat16", {"gpu", "budget"}, decay=0.02),
    _case(32, 256, 4, 64, 64, "bfloat16", {"gpu", "budget"}, decay=0.02),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Queries and keys of length one; strengths between 0 and 1, or all `beta`.

    With `keys="same"` every step has the key of the first. `decay` is the mean of the decay's
    logarithms, with their sign changed, which lie between 0 and twice that.
    """
    B, T, N, H, E = (case.sizes[letter] for letter in "BTNHE")
    keys = jax.random.split(key, 6)
    k_BTNH = _unit(jax.random.normal(keys[1], (B, T, N, H)))
    if case.options.get("keys") == "same":
        k_BTNH = jnp.tile(k_BTNH[:, :1], (1, T, 1, 1))
    beta_BTN = jax.nn.sigmoid(jax.random.normal(keys[3], (B, T, N)))
    if "beta" in case.options:
        beta_BTN = jnp.full((B, T, N), case.options["beta"])
    arrays = {
        "q": _unit(jax.random.normal(keys[0], (B, T, N, H))).astype(case.dtype),
        "k": k_BTNH.astype(case.dtype),
        "v": jax.random.normal(keys[2], (B, T, N, E)).astype(case.dtype),
        "beta": beta_BTN.astype(case.dtype),
    }
    if "decay" in case.options:
        share_BTN = jax.random.uniform(keys[5], (B, T, N))
        arrays["log_decay"] = (-2.0 * case.options["decay"] * share_BTN).astype(case.dtype)
    if case.options.get("initial_state"):
        arrays["state"] = jax.random.normal(keys[4], (B, N, H, E))
    return arrays


def _unit(x_BTNH: jax.Array) -> jax.Array:
    return x_BTNH / jnp.linalg.norm(x_BTNH, axis=-1, keepdims=True)


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """The output and the memory after the last step."""
    out_BTNE, state_BNHE = delta_rule(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        arrays["beta"],
        log_decay=arrays.get("log_decay"),
        initial_state=arrays.get("state"),
        return_state=True,
        implementation=implementation,
    )
    return {"out": out_BTNE, "end": state_BNHE}


SUITE = Suite(
    op="delta_rule",
    cases=CASES,
    make=make,
    call=call,
    differentiable=("q", "k", "v", "beta", "log_decay", "state"),
    implementations=tuple(IMPLEMENTATIONS),
)

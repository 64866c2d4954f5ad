"""Workloads of `prefix_mean`: small test cases, and the paper's sizes to time."""

import jax
import jax.numpy as jnp

from iaj_kernels.core.cases import Arrays, Case, Suite, resets
from iaj_kernels.prefix_mean.api import IMPLEMENTATIONS, prefix_mean
from iaj_kernels.prefix_mean.state import State

GPU = frozenset({"gpu", "budget"})


def _case(B: int, T: int, R: int, E: int, dtype: str, uses, **options) -> Case:
    text = "".join(f"_{value if name == 'gates' else name}" for name, value in options.items())
    name = f"b{B}_t{T}_r{R}_e{E}_{dtype}{text}"
    # The means of prototypes with the same gates and long half-lives are nearly the same.
    repeats = options.get("gates") == "uniform"
    return Case(name, {"B": B, "T": T, "R": R, "E": E}, dtype, options, frozenset(uses), repeats)


CASES = (
    *(_case(2, T, 16, 32, "float32", {"test"}) for T in (1, 2, 63, 64, 65, 200)),
    _case(2, 65, 32, 32, "float32", {"test"}),
    _case(2, 65, 64, 32, "float32", {"test"}),
    _case(2, 130, 32, 64, "bfloat16", {"test"}),
    _case(2, 130, 32, 32, "float32", {"test"}, half_life=(0.1, 10_000.0)),
    _case(2, 130, 32, 32, "float32", {"test"}, gates="one_hot"),
    _case(2, 130, 32, 32, "float32", {"test"}, gates="uniform"),
    _case(2, 130, 32, 32, "float32", {"test"}, mass_normalisation=False),
    _case(2, 130, 32, 32, "float32", {"test"}, initial_state=True),
    *(
        _case(2, 67, 16, 8, "float32", {"resets"}, resets=True, initial_state=True, **options)
        for options in ({}, {"mass_normalisation": False})
    ),
    _case(8, 256, 32, 128, "float32", {"cpu"}),
    _case(1, 4096, 32, 128, "float32", {"cpu"}),
    _case(32, 256, 32, 128, "bfloat16", GPU),
    _case(32, 512, 32, 256, "bfloat16", GPU),
    _case(1, 32_768, 32, 256, "bfloat16", GPU),
    _case(1, 131_072, 32, 256, "bfloat16", {"gpu"}),
    *(_case(32_768 // T, T, 32, 256, "bfloat16", {"gpu"}) for T in (2048, 8192)),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Gates as softmax, one-hot or uniform rows; half-lives spread evenly in their logarithm."""
    B, T, R, E = (case.sizes[letter] for letter in "BTRE")
    keys = jax.random.split(key, 5)
    write_BTR = _gates(case, keys[0], (B, T, R))
    read_BTR = _gates(case, keys[1], (B, T, R))
    shortest, longest = case.options.get("half_life", (1.0, 1_000.0))
    half_life_R = jnp.exp(jnp.linspace(jnp.log(shortest), jnp.log(longest), R))
    arrays = {
        "write": write_BTR.astype(case.dtype),
        "value": jax.random.normal(keys[2], (B, T, E)).astype(case.dtype),
        "decay": jnp.exp2(-1.0 / half_life_R),
        "read": read_BTR.astype(case.dtype),
    }
    if case.options.get("resets"):
        arrays["resets"] = resets(B, T)
    if case.options.get("initial_state"):
        mass_BR = jax.random.uniform(keys[3], (B, R), minval=0.1, maxval=5.0)
        mean_BRE = jax.random.normal(keys[4], (B, R, E))
        arrays |= {"total": mass_BR[..., None] * mean_BRE, "mass": mass_BR}
    return arrays


def _gates(case: Case, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    match case.options.get("gates", "softmax"):
        case "one_hot":
            return jax.nn.one_hot(jax.random.randint(key, shape[:2], 0, shape[2]), shape[2])
        case "uniform":
            return jnp.full(shape, 1.0 / shape[2])
        case _:
            return jax.nn.softmax(2.0 * jax.random.normal(key, shape), axis=-1)


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """The output and the state after the last step."""
    out_BTE, state = prefix_mean(
        arrays["write"],
        arrays["value"],
        arrays["decay"],
        arrays["read"],
        initial_state=State(arrays["total"], arrays["mass"]) if "total" in arrays else None,
        return_state=True,
        mass_normalisation=case.options.get("mass_normalisation", True),
        resets_BT=arrays.get("resets"),
        implementation=implementation,
    )
    return {"out": out_BTE, "total": state.total_BRE, "mass": state.mass_BR}


SUITE = Suite(
    op="prefix_mean",
    cases=CASES,
    make=make,
    call=call,
    differentiable=("write", "value", "decay", "read", "total", "mass"),
    implementations=tuple(IMPLEMENTATIONS),
    tiles=(
        # Not two warps: once their output was wrong on a GPU (docs/kernels/gpu.md).
        {"chunk": (16, 32), "num_warps": (4, 8)},
        {"segment": (64, 128, 256, 512)},
        {"block_e": (64, 128), "num_stages": (1, 2)},
        {"backward_chunk": (16, 32), "backward_num_warps": (4, 8)},
        {"backward_segment": (64, 128, 256, 512)},
    ),
)

"""Workloads of `gated_slots`: small test cases, and a mixer's sizes to time."""

import jax
import jax.numpy as jnp

from iaj_kernels.core.cases import Arrays, Case, Suite, resets
from iaj_kernels.gated_slots.api import IMPLEMENTATIONS, gated_slots
from iaj_kernels.gated_slots.config import Slots


def _case(B: int, T: int, N: int, M: int, H: int, E: int, dtype: str, uses, **options) -> Case:
    text = "".join(f"_{name}{value}" for name, value in options.items())
    name = f"b{B}_t{T}_n{N}_m{M}_h{H}_e{E}_{dtype}{text}"
    sizes = {"B": B, "T": T, "N": N, "M": M, "H": H, "E": E}
    return Case(name, sizes, dtype, options, frozenset(uses))


CASES = (
    *(_case(2, T, 2, 5, 8, 6, "float32", {"test"}) for T in (1, 2, 15, 16, 17, 60)),
    _case(2, 33, 2, 5, 8, 6, "bfloat16", {"test"}),
    _case(2, 33, 2, 5, 8, 6, "float32", {"test"}, initial_state=True),
    *(_case(2, 33, 2, 5, 8, 6, "float32", {"test"}, decay=decay) for decay in (0.0, 9.0)),
    _case(2, 33, 2, 5, 8, 6, "float32", {"test"}, written=0.2, initial_state=True),
    _case(2, 37, 2, 5, 8, 6, "float32", {"test"}, resets=True, initial_state=True),
    _case(8, 256, 4, 64, 64, 64, "float32", {"cpu"}),
    _case(32, 256, 4, 64, 64, 64, "bfloat16", {"gpu"}),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Normal queries, keys and values; decays with logarithms between 0 and -2 `decay`, or 0.6.

    With `written`, only that share of the slots of a step have a decay.
    """
    B, T, N, M, H, E = (case.sizes[letter] for letter in "BTNMHE")
    keys = jax.random.split(key, 7)
    share_BTNM = jax.random.uniform(keys[3], (B, T, N, M))
    if "written" in case.options:
        kept = jax.random.bernoulli(keys[4], case.options["written"], (B, T, N, M))
        share_BTNM = jnp.where(kept, share_BTNM, 0.0)
    arrays = {
        "q": jax.random.normal(keys[0], (B, T, N, H)),
        "k": jax.random.normal(keys[1], (B, T, N, H)),
        "v": jax.random.normal(keys[2], (B, T, N, E)),
        "log_decay": -2.0 * case.options.get("decay", 0.3) * share_BTNM,
    }
    arrays = {name: x.astype(case.dtype) for name, x in arrays.items()}
    if case.options.get("resets"):
        arrays["resets"] = resets(B, T)
    if case.options.get("initial_state"):
        arrays["slot_keys"] = jax.random.normal(keys[5], (B, N, M, H))
        arrays["slot_values"] = jax.random.normal(keys[6], (B, N, M, E))
    return arrays


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """The output and the slots after the last step."""
    state = None
    if "slot_keys" in arrays:
        state = Slots(arrays["slot_keys"], arrays["slot_values"])
    out_BTNE, end = gated_slots(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        arrays["log_decay"],
        scale=case.sizes["H"] ** -0.5,
        initial_state=state,
        return_state=True,
        resets_BT=arrays.get("resets"),
        implementation=implementation,
    )
    return {"out": out_BTNE, "end_keys": end.keys_BNMH, "end_values": end.values_BNME}


SUITE = Suite(
    op="gated_slots",
    cases=CASES,
    make=make,
    call=call,
    differentiable=("q", "k", "v", "log_decay", "slot_keys", "slot_values"),
    implementations=tuple(IMPLEMENTATIONS),
)

"""Workloads of `gated_attention`: small test cases, and the paper's and models' sizes to time."""

import jax
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core.cases import Arrays, Case, Suite
from iaj_kernels.gated_attention.api import IMPLEMENTATIONS, gated_attention

GPU = frozenset({"gpu"})
BUDGET = frozenset({"gpu", "budget"})

# Options that `call` passes on unchanged.
_OPTIONS = (
    "mode",
    "scale",
    "gate_scale",
    "soft_cap",
    "causal",
    "window",
    "start",
    "renormalise",
)


def _case(B: int, T: int, N: int, H: int, dtype: str, uses, *, S=None, K=None, **options) -> Case:
    S, K = S or T, K or N
    text = "".join(
        f"_{option}" if value is True else f"_{option}_{value}" for option, value in options.items()
    )
    name = f"b{B}_t{T}_s{S}_n{N}_k{K}_h{H}_{dtype}{text}"
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H}
    return Case(name, sizes, dtype, options, frozenset(uses))


def _test(T: int, *, dtype: str = "float32", B=2, N=4, H=32, **options) -> Case:
    return _case(B, T, N, H, dtype, {"test"}, **options)


CASES = (
    # Lengths around one block, grouped heads; (1, 65) is a step of decoding.
    *(_test(T, S=S, K=2) for T, S in ((1, 1), (1, 65), (64, 64), (65, 200))),
    _test(2, mode="expected", gate_scale=1.0),
    _test(63, K=1, mode="threshold", soft_cap=2.0),
    _test(65, mode="open", causal=False),
    _test(65, K=2, soft_cap=2.0, gate_scale=0.5),
    _test(200, K=2, window=37, segments=True),
    _test(65, B=1, N=2, K=1, H=64, dtype="bfloat16"),
    *(_test(17, B=1, N=2, K=1, H=H) for H in (128, 256)),
    *(_case(4, T, 12, 64, "float32", {"cpu"}) for T in (64, 512)),
    _case(1, 2048, 12, 64, "float32", {"cpu"}),
    _case(16, 512, 12, 64, "bfloat16", GPU),
    _case(16, 1024, 12, 64, "bfloat16", GPU),
    _case(16, 2048, 12, 64, "bfloat16", BUDGET),
    _case(16, 512, 32, 128, "bfloat16", GPU, K=8),
    _case(4, 2048, 32, 128, "bfloat16", BUDGET, K=8),
    # A sparse model at inference: about 0.5 % of the gates are open, near the paper's Table 1.
    _case(1, 8192, 12, 64, "bfloat16", GPU, mode="threshold", gate_bias=-2.576),
    # The paper's Figure 10.
    *(_case(10, T, 10, 10, "float32", GPU) for T in (32, 64, 128, 256, 512, 1024, 2048)),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Normal queries, keys and values, so that scores are standard normal; a bias for each head."""
    B, T, S, N, K, H = (case.sizes[letter] for letter in "BTSNKH")
    keys = jax.random.split(key, 4)
    bias = case.options.get("gate_bias")
    arrays = {
        "q": jax.random.normal(keys[0], (B, T, N, H)).astype(case.dtype),
        "k": jax.random.normal(keys[1], (B, S, K, H)).astype(case.dtype),
        "v": jax.random.normal(keys[2], (B, S, K, H)).astype(case.dtype),
        "gate_bias": jax.random.normal(keys[3], (N,)) if bias is None else jnp.full((N,), bias),
    }
    if case.options.get("segments"):
        # Two documents and a padded tail, at other places in each row.
        cut_B1, end_B1 = (jnp.asarray([[T // 2], [T // 3]]), jnp.asarray([[T], [T - T // 8]]))
        place_1T = jnp.arange(T)[None]
        segment_BT = jnp.where(place_1T < cut_B1, 0, 1)
        arrays["segment_ids"] = jnp.where(place_1T < end_B1, segment_BT, -1)
    return arrays


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """Every output; in mode "sample" the seed is 7."""
    options = {name: case.options[name] for name in _OPTIONS if name in case.options}
    sampled = options.get("mode", "sample") == "sample"
    result = gated_attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        gate_bias=arrays["gate_bias"],
        seed=7 if sampled else None,
        segment_ids=arrays.get("segment_ids"),
        implementation=implementation,
        **options,
    )
    return {
        "out": result.out_BTNH,
        "expected_edges": result.expected_edges_BN,
        "open_edges": result.open_edges_BN,
    }


SUITE = Suite(
    op="gated_attention",
    cases=CASES,
    make=make,
    call=call,
    differentiable=("q", "k", "v", "gate_bias"),
    implementations=tuple(IMPLEMENTATIONS),
    tiles=tiles.choices({"forward": "queries", "queries": "queries", "keys": "keys"}),
)

"""Workloads of `row_map_attention`: small test cases, and models' sizes to time."""

import jax
import jax.numpy as jnp

from iaj_kernels.attention import tiles
from iaj_kernels.core.cases import Arrays, Case, Suite
from iaj_kernels.row_map_attention import maps
from iaj_kernels.row_map_attention.api import IMPLEMENTATIONS, row_map_attention

GPU = frozenset({"gpu", "budget"})
MAPS = {
    "softmax": maps.softmax(),
    "relu1": maps.relu_power(1),
    "relu2.5": maps.relu_power(2.5),
    "relu4": maps.relu_power(4),
    "relu16": maps.relu_power(16),
    "sigmoid": maps.sigmoid(),
    "ramapuram": maps.ramapuram_sigmoid(),
    "ramapuram_plain": maps.ramapuram_sigmoid(minus_log_n=False),
    "relu2_over_root": maps.relu_over_length(2, 0.5),
}


def _case(name: str, T: int, row_map: str, dtype: str = "float32", uses=("test",), **options):
    sizes = {"B": 2, "T": T, "S": T, "N": 4, "K": 2, "H": 16}
    sizes |= {letter: options.pop(letter) for letter in "BSNKH" if letter in options}
    options |= {"row_map": row_map}
    return Case(name, sizes, dtype, options, frozenset(uses))


def _large(B: int, T: int, N: int, K: int, H: int, row_map: str, dtype: str, uses, **options):
    name = f"b{B}_t{T}_n{N}_k{K}_h{H}_{row_map}_{dtype}" + "".join(f"_{key}" for key in options)
    return _case(name, T, row_map, dtype, uses, B=B, N=N, K=K, H=H, **options)


CASES = (
    *(_case(f"{name}_t65", 65, name, bias=0.5) for name in ("softmax", "relu4", "sigmoid")),
    _case("ramapuram_plain_t1", 1, "ramapuram_plain", bias=0.5),
    _case("relu1_t2", 2, "relu1", bias=0.5),
    _case("relu2.5_t63", 63, "relu2.5", bias=0.5),
    _case("relu4_t200", 200, "relu4", bias=0.5),
    _case("relu2_over_root_window_t200", 200, "relu2_over_root", bias=0.5, window=37),
    _case("ramapuram_window_segments", 65, "ramapuram", bias=0.5, window=37, segments=True),
    _case("relu4_heads_segments", 65, "relu4", bias=0.5, heads=True, segments=True),
    _case("relu4_dead_rows", 65, "relu4", bias=-1.5),
    _case("relu2_over_root_dead_rows", 65, "relu2_over_root", bias=-1.5),
    _case("relu4_start", 33, "relu4", bias=0.5, S=70, start=(5, 20)),
    _case("relu4_more_keys_not_causal", 33, "relu4", bias=0.5, S=70, causal=False),
    _case("relu4_soft_cap", 65, "relu4", bias=0.5, soft_cap=2.0),
    _case("relu4_one_key_head", 65, "relu4", bias=0.5, K=1, H=64),
    _case("relu16_large_scores", 65, "relu16", bias=0.5, size=100.0),
    # Beside the bias larger scores would be rounded so far that the bounds held nothing.
    _case("relu16_bfloat16_small_scores", 65, "relu16", "bfloat16", bias=0.5, size=0.1),
    _case("relu2_over_root_bfloat16", 65, "relu2_over_root", "bfloat16", bias=0.5),
    _case("softmax_bfloat16", 65, "softmax", "bfloat16"),
    _case("sigmoid_bfloat16_low_scores", 65, "sigmoid", "bfloat16", bias=-3.0),
    _large(8, 512, 12, 12, 64, "relu4", "float32", {"cpu", "budget"}),
    _large(1, 2048, 12, 12, 64, "relu4", "float32", {"cpu"}),
    _large(1, 2048, 12, 12, 64, "softmax", "float32", {"cpu"}),
    *(_large(16, 2048, 12, 12, 64, name, "bfloat16", GPU) for name in ("softmax", "relu4")),
    _large(16, 2048, 12, 12, 64, "relu4", "bfloat16", GPU, heads=True),
    _large(16, 2048, 12, 12, 64, "relu16", "bfloat16", {"gpu"}),
    _large(16, 2048, 12, 12, 64, "sigmoid", "bfloat16", GPU),
    _large(8, 2048, 32, 8, 64, "relu4", "bfloat16", {"gpu"}),
    _large(8, 4096, 16, 8, 128, "relu4", "bfloat16", GPU),
    _large(4, 4096, 8, 1, 256, "relu4", "bfloat16", GPU, window=512),
)


def make(case: Case, key: jax.Array) -> Arrays:
    """Inputs with scores of standard deviation `size` (default 1), and a bias for each head."""
    B, T, S, N, K, H = (case.sizes[letter] for letter in "BTSNKH")
    options = case.options
    keys = jax.random.split(key, 4)
    q_BTNH = options.get("size", 1.0) * jax.random.normal(keys[0], (B, T, N, H))
    arrays = {
        "q": q_BTNH.astype(case.dtype),
        "k": jax.random.normal(keys[1], (B, S, K, H)).astype(case.dtype),
        "v": jax.random.normal(keys[2], (B, S, K, H)).astype(case.dtype),
        "bias": options.get("bias", 0.0) + 0.3 * jax.random.normal(keys[3], (N,)),
    }
    if options.get("heads"):
        arrays["heads"] = jnp.arange(N) % 3 == 0
    if options.get("segments"):
        # Two texts and a padded end; the last row of the batch is padding alone.
        segments_T = jnp.where(jnp.arange(T) < T // 3, 0, 1)
        segments_T = jnp.where(jnp.arange(T) < T - T // 5, segments_T, -1)
        arrays["segments"] = jnp.where(jnp.arange(B)[:, None] == B - 1, -1, segments_T[None])
    if "start" in options:
        arrays["start"] = jnp.asarray(options["start"], jnp.int32)
    return arrays


def call(case: Case, arrays: Arrays, implementation: str | None) -> dict[str, jax.Array]:
    """The output and the count of dead rows."""
    out_BTNH, dead_BN = row_map_attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        row_map=MAPS[case.options["row_map"]],
        bias=arrays["bias"],
        heads=arrays.get("heads"),
        soft_cap=case.options.get("soft_cap"),
        causal=case.options.get("causal", True),
        window=case.options.get("window"),
        segment_ids=arrays.get("segments"),
        start=arrays.get("start"),
        implementation=implementation,
    )
    return {"out": out_BTNH, "dead_rows": dead_BN}


SUITE = Suite(
    op="row_map_attention",
    cases=CASES,
    make=make,
    call=call,
    differentiable=("q", "k", "v", "bias"),
    implementations=tuple(IMPLEMENTATIONS),
    tiles=tiles.choices({"forward": "queries", "dq": "queries", "dkv": "keys"}),
)

"""Forward passes at batch 1 by length: prefill, not decoding."""

from collections.abc import Callable, Iterator, Sequence
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.mixers import AttentionMixer
from tools.bench.shapes import BenchConfig, build, random_params
from tools.bench.timing import Pass, in_turns, ratio

# A baseline for GPUs: attention by cuDNN in place of ours.
CUDNN = "llama, cuDNN"


def _cudnn_softmax(attend, q_BTNH, k_BSKH, v_BSKH, *, visibility, scale, cap):
    del attend
    segments = visibility.query_segments_BT
    if cap is not None or visibility.window is not None or segments is not None:
        raise UsageError("attend: 'cudnn' has no soft cap, window or segments; use 'kernels'")
    if not visibility.causal or visibility.first != 0:
        raise UsageError("attend: 'cudnn' reads whole rows from their first token; use 'kernels'")
    q_BTNH, k_BSKH = (x.astype(v_BSKH.dtype) for x in (q_BTNH, k_BSKH))
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True, scale=scale, implementation="cudnn"
    )


lm_jax.register_fused(lm_jax.softmax, "cudnn", _cudnn_softmax)


def forward(
    name: str, config: BenchConfig, length: int, calls: int = 1, *, softmax: str = "kernels"
) -> Pass:
    """Forward passes, started one after another, that end in the logits of the last position.

    Attention forms no whole scores: its softmax is fused, by our kernel or by "cudnn".
    """
    cfg, mixer = build(name, config)
    params = random_params(cfg, mixer, config.dtype)
    tokens_1T = jnp.ones((1, length), jnp.int32)
    last_11 = jnp.full((1, 1), length - 1)
    attend: Any = lm_jax.softmax
    if isinstance(mixer, AttentionMixer):
        attend = lm_jax.fused(lm_jax.softmax, softmax)
    run = jax.jit(
        lambda params: (
            lm_jax.forward(
                params, tokens_1T, cfg, mixer=mixer, attend=attend, logits_at=last_11
            ).logits
        )
    )
    return functools.partial(_repeated, run, params, calls)


def _repeated(run: Callable[[Any], jax.Array], params: Any, calls: int) -> None:
    for _ in range(calls - 1):
        run(params)
    jax.block_until_ready(run(params))


def bench_forward(
    names: Sequence[str], config: BenchConfig, lengths: Sequence[int], repeats: int, calls: int = 1
) -> Iterator[dict[str, Any]]:
    """Times forward passes in turns; yields what is measured after each length.

    Args:
      names: of models, ProtoT first; on a GPU LLaMA is timed with cuDNN's attention too.
      config: their sizes and dtype.
      lengths: tokens of a pass.
      repeats: turns.
      calls: passes of one timing, so that waiting for the last is spread over them.
    """
    models = {name: functools.partial(forward, name) for name in names}
    if "llama" in names and jax.default_backend() == "gpu" and config.dtype == "bfloat16":
        models[CUDNN] = functools.partial(forward, "llama", softmax="cudnn")
    first, *others = models
    results: dict[str, Any] = {}
    print(f"forward at batch 1, {config.dtype}; ratios are the model's time over ProtoT's")
    for length in lengths:
        runs = in_turns([passes(config, length, calls) for passes in models.values()], repeats)
        seconds = {
            name: [each / calls for each in series]
            for name, series in zip(models, runs, strict=True)
        }
        results[str(length)] = seconds
        ratios = "  ".join(f"{name} {ratio(seconds[name], seconds[first])}" for name in others)
        print(
            f"  {length:7,} tokens  {first} {statistics.median(seconds[first]):8.4f} s  {ratios}",
            flush=True,
        )
        yield results

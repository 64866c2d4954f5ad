"""Forward passes at batch 1 by length: prefill, not decoding.

A pass computes the logits of all positions, as that of a language model does. Those of a long row
do not fit in memory together, so that the head takes positions in chunks, and of each position the
greatest logit stays. (Until 2026-11-28 a pass ended in the logits of the last position, which left
out half of ProtoT's work at any length and almost none of LLaMA's at long ones.)
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

import lm_jax
from lm_jax.model import layers
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import AttentionMixer
from lm_jax.model.params import ParamTree
from tools.bench import front
from tools.bench.shapes import BenchConfig, build, random_params
from tools.bench.timing import Pass

# Of positions whose logits are in memory together, for `forward` and its label.
HEAD_CHUNK = 1_024
# A baseline for GPUs: attention by cuDNN in place of ours.
CUDNN = "llama, cuDNN"


def forward(
    name: str, config: BenchConfig, length: int, calls: int = 1, *, softmax: str = "kernels"
) -> Pass:
    """Forward passes, started one after another, with the logits of all positions (`greatest`).

    Attention forms no whole scores: its softmax is fused, by our kernel or by "cudnn".
    """
    cfg, mixer = build(name, config)
    params = random_params(cfg, mixer, config.dtype)
    tokens_1T = jnp.ones((1, length), jnp.int32)
    attend: Any = lm_jax.softmax
    if isinstance(mixer, AttentionMixer):
        attend = lm_jax.fused(lm_jax.softmax, softmax)

    def run(params: ParamTree) -> jax.Array:
        output = lm_jax.forward(params, tokens_1T, cfg, mixer=mixer, attend=attend)
        # The logits of the output are never read, and so not computed as a whole.
        return greatest(params, output.hidden, cfg)

    return functools.partial(_repeated, jax.jit(run), params, calls)


def greatest(params: ParamTree, hidden_BTD: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """The greatest logit of every position, `[B, T]`, with the head in chunks of positions."""
    B, T, D = hidden_BTD.shape
    chunk = min(HEAD_CHUNK, T)
    filled_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, -T % chunk), (0, 0)))
    chunks_nBCD = filled_BTD.reshape(B, -1, chunk, D).swapaxes(0, 1)
    greatest_nBC = jax.lax.map(
        lambda hidden_BCD: layers.unembed(params, hidden_BCD, cfg).max(-1), chunks_nBCD
    )
    return greatest_nBC.swapaxes(0, 1).reshape(B, -1)[:, :T]


def _repeated(run: Callable[[Any], jax.Array], params: Any, calls: int) -> None:
    for _ in range(calls - 1):
        run(params)
    jax.block_until_ready(run(params))


def bench_forward(
    names: Sequence[str], config: BenchConfig, lengths: Sequence[int], repeats: int, calls: int = 1
) -> Iterator[dict[str, Any]]:
    """Times forward passes in turns; yields what is measured after each length.

    Args:
      names: names of the models, ProtoT first; on a GPU LLaMA is timed with cuDNN's attention too.
      config: the sizes and dtype of the models.
      lengths: tokens of a pass.
      repeats: number of turns.
      calls: passes of one timing, so that waiting for the last is spread over them.
    """
    models = {name: functools.partial(forward, name) for name in names}
    if "llama" in names and jax.default_backend() == "gpu" and config.dtype == "bfloat16":
        models[CUDNN] = functools.partial(forward, "llama", softmax="cudnn")
    results: dict[str, Any] = {}
    print(
        f"forward at batch 1, {config.dtype}, logits of all positions in chunks of {HEAD_CHUNK:,}"
    )
    for length in lengths:
        runs = {name: passes(config, length, calls) for name, passes in models.items()}
        results[str(length)] = front.timed(f"{length:,} tokens", runs, repeats, calls=calls)
        yield results

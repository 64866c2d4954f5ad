"""Time of exact patching of all heads relative to TransformerLens, on the same model in one run.

    python -m venv lens && lens/bin/pip install transformer-lens==2.16.1 'pyarrow<22'
    python -m tools.bench.patching_lens --python lens/bin/python          SmolLM2, 8 prompts of ioi
    python -m tools.bench.patching_lens --python lens/bin/python --layers 2 --repeats 1

TransformerLens runs in its own environment, as a process that waits while ours runs: `patching.
get_act_patch_attn_head_out_all_pos` on the same weights and prompts, in float32, by denoising. The
mean effects of both are compared first; if they differ, nothing is timed and the exit code is 1.
Both run in turns. Ratios are of seconds, and of CPU seconds, which a busy machine changes less.
Only models of Llama's blocks without biases are taken.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import json
from pathlib import Path
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from sparse_jax.circuits import patching
from sparse_jax.circuits.runs import Batch, CircuitModel, metric
from sparse_jax.circuits.tasks import make_task
from tools.bench import front
from tools.bench.workers.waiting import Waiting

# Of mean logit differences in float32, over two orders of summation in thirty layers.
TOLERANCE = 1e-3
WORKER = Path(__file__).parent / "workers" / "lens.py"


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The fields of `HookedTransformerConfig` of a model.

    Raises:
      UsageError: it has other blocks than Llama's without biases.
    """
    plain = dataclasses.replace(
        lm_jax.DecoderConfig(
            num_layers=cfg.num_layers,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            hidden_size=cfg.hidden_size,
            mlp_size=cfg.mlp_size,
            vocab_size=cfg.vocab_size,
            max_length=cfg.max_length,
        ),
        family=cfg.family,
        norm_eps=cfg.norm_eps,
        rope=cfg.rope,
        tie_embeddings=cfg.tie_embeddings,
        pad_id=cfg.pad_id,
    )
    if cfg != plain or cfg.rope is None or cfg.rope.scaling is not None or cfg.rope.fraction != 1:
        raise UsageError("--model: its blocks are not those of Llama; give one such as smollm2")
    return {
        "n_layers": cfg.num_layers,
        "d_model": cfg.hidden_size,
        "n_heads": cfg.num_heads,
        # With a number it has grouped heads, whose weights have other names.
        "n_key_value_heads": cfg.num_kv_heads if cfg.num_kv_heads != cfg.num_heads else None,
        "d_head": cfg.head_dim,
        "d_mlp": cfg.mlp_size,
        "d_vocab": cfg.vocab_size,
        "n_ctx": 256,
        "act_fn": "silu",
        "gated_mlp": True,
        "normalization_type": "RMS",
        "final_rms": True,
        "eps": cfg.norm_eps,
        "positional_embedding_type": "rotary",
        "rotary_dim": cfg.head_dim,
        "rotary_base": int(cfg.rope.theta),
        "device": "cpu",
        "seed": 0,
    }


def weights(params: Any, cfg: DecoderConfig) -> dict[str, np.ndarray]:
    """The parameters by the names of TransformerLens."""
    params = jax.tree.map(np.asarray, params)
    embed_VD = params["embed"]["tokens"]
    unembed_DV = embed_VD.T if cfg.tie_embeddings else params["unembed"]
    found = {
        "embed.W_E": embed_VD,
        "unembed.W_U": np.ascontiguousarray(unembed_DV),
        "ln_final.w": params["final"]["scale"],
    }
    blocks = params["blocks"]
    for layer in range(cfg.num_layers):
        mixer, mlp = ({n: x[layer] for n, x in blocks[part].items()} for part in ("mixer", "mlp"))
        own = {
            "ln1.w": blocks["ln1"]["scale"][layer],
            "ln2.w": blocks["ln2"]["scale"][layer],
            "attn.W_Q": mixer["q"].swapaxes(0, 1),
            "attn._W_K": mixer["k"].swapaxes(0, 1),
            "attn._W_V": mixer["v"].swapaxes(0, 1),
            "attn.W_O": mixer["o"],
            "mlp.W_gate": mlp["gate"],
            "mlp.W_in": mlp["up"],
            "mlp.W_out": mlp["down"],
        }
        if cfg.num_kv_heads == cfg.num_heads:
            own = {name.replace("._W", ".W"): value for name, value in own.items()}
        found |= {f"blocks.{layer}.{n}": np.ascontiguousarray(x) for n, x in own.items()}
    return found


def start(python: str, folder: Path) -> Waiting:
    """TransformerLens in a process of its own, which waits between calls."""
    # Isolated: modules beside the worker have names that libraries look for.
    return Waiting(
        [python, "-I", str(WORKER), str(folder)], f"--python={python}: TransformerLens there"
    )


def write(folder: Path, model: CircuitModel, batch: Batch) -> None:
    """Writes what the worker reads."""
    continuations = batch.continuations
    np.savez(folder / "model.npz", allow_pickle=False, **weights(model.params, model.cfg))
    prompts: Mapping[str, Any] = {
        "clean": batch.clean_BT,
        "corrupt": batch.corrupt_BT,
        "position": batch.at_B2[:, 0],
        "right": continuations.right_BA[:, 0],
        "wrong": continuations.wrong_BA[:, 0],
    }
    arrays = {name: np.asarray(x) for name, x in prompts.items()}
    np.savez(folder / "prompts.npz", allow_pickle=False, **arrays)
    (folder / "settings.json").write_text(json.dumps(settings(model.cfg)))


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Compares and times both; false where effects differ."""
    loaded = lm_jax.load_pretrained(arguments.model)
    if loaded.tokenizer is None:
        raise UsageError(f"--model={arguments.model} has no tokenizer; give a model with one")
    model = CircuitModel.of(loaded)
    if arguments.layers:
        cut = dataclasses.replace(model.cfg, num_layers=arguments.layers)
        blocks = jax.tree.map(lambda x: x[: arguments.layers], model.params["blocks"])
        model = CircuitModel(model.params | {"blocks": blocks}, cut)
    task = make_task("ioi", loaded.tokenizer, count=arguments.prompts, seed=0)
    batch = Batch.of(task)
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), model, batch)
        lens = start(arguments.python, Path(name))
    try:
        return record.keep("lens", measure(model, batch, lens, arguments))
    finally:
        lens.close()


def measure(
    model: CircuitModel, batch: Batch, lens: Waiting, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Effects of both, compared, and their seconds in turns; {} where they differ."""

    def ours() -> tuple[np.ndarray, float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        effects = patching.head_effects(
            model, batch, direction="denoising", at_once=arguments.at_once
        )
        mean_LN = np.asarray(effects).mean(-1)
        return mean_LN, time.perf_counter() - wall, time.process_time() - cpu

    compile_seconds = ours()[1]
    before = float(np.asarray(metric(model, batch, batch.corrupt_BT)).mean())
    series: dict[str, list[tuple[float, float]]] = {"lens": [], "ours": []}
    for _ in range(arguments.repeats):
        theirs = lens.run()
        mean_LN, wall, cpu = ours()
        off = np.abs(np.array(theirs["metric"]) - lens.started["before"] - mean_LN).max()
        off = max(float(off), abs(before - lens.started["before"]))
        if not front.agrees("heads", off, TOLERANCE, "mean effects differ by"):
            return {}
        series["lens"].append((theirs["wall"], theirs["cpu"]))
        series["ours"].append((wall, cpu))
    print(", ".join(f"{name} {value}" for name, value in lens.started["versions"].items()))
    B, T = batch.clean_BT.shape
    cfg = model.cfg
    print(f"{cfg.num_layers * cfg.num_heads} heads x {B} prompts of {T} tokens")
    for index, what in enumerate(("seconds", "CPU seconds")):
        medians = [statistics.median(each[index] for each in own) for own in series.values()]
        ratios = [
            theirs[index] / own[index]
            for theirs, own in zip(series["lens"], series["ours"], strict=True)
        ]
        print(
            f"  {what}: TransformerLens {medians[0]:.2f}, ours {medians[1]:.2f}, "
            f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    print(f"  our first call, with compilation: {compile_seconds:.2f} s; off by at most {off:.1e}")
    return {
        "versions": lens.started["versions"],
        "seconds": series,
        "largest_difference": off,
        "first_call": compile_seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("bench.patching_lens", __doc__, repeats=3)
    parser.add_argument("--python", required=True, help="interpreter that has TransformerLens")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", type=int, default=0, help="the first so many; 0 takes all")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--at_once", type=int, default=8)
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

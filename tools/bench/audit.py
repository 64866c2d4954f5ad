"""Time and memory ratios of the audit's forward passes, measured in one run.

    python -m tools.bench.audit                     SmolLM2-135M from the cache
    python -m tools.bench.audit --model FOLDER --length 512 --prompts 20 --prompt-length 140

1. Forward against `transformers` with torch on the same cores, logits of every position (needs
   torch; without it a line says that this was not measured).
2. S_p of the last row of `--prompts` prompts, one at a time as in the audit: the diagnosing forward
   against `transformers` with a hook on its attention (needs torch).
3. The diagnosing forward against the ordinary one, both with the logits of one position.
4. Memory of these two: temporaries and outputs of the compiled program, and the peak resident size
   of a separate process.

Both sides of a ratio are measured in turns within this run, so that load on the machine affects
both; the median over the turns is printed with its range. Before timing, the results of both are
compared; if they disagree, no ratio is printed and the exit code is 1.
"""

import argparse
from collections.abc import Sequence
import functools
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax.errors import BadInputError
from polyattn_jax.audit import measure, model_calibration
from polyattn_jax.recipes.diagnostic import relative_error_bound, row_stats
from polyattn_jax.recipes.probe import DEGREES
from tools.bench import front
from tools.bench.in_torch import llama as torch_llama
from tools.bench.in_torch.scores import ScoreRows

LOGIT_TOLERANCE = 1e-3
# Of the target's attention mass, in rows whose target is not close to dead.
MASS_TOLERANCE, LEAST_TARGET = 1e-2, 0.1
BIASES = (0.0, 1.0)
PAUSE = 0.5  # seconds
PASSES = ("ordinary", "diagnosing")


def passes(model: lm_jax.Pretrained, tokens_BT: jax.Array) -> dict[str, tuple[Any, tuple]]:
    """The ordinary and the diagnosing forward, by name: a jitted function and its arguments."""
    B, T = tokens_BT.shape
    last_B1 = jnp.full((B, 1), T - 1)

    def ordinary(params: Any, tokens_BT: jax.Array, last_B1: jax.Array) -> jax.Array:
        return lm_jax.forward(params, tokens_BT, model.cfg, logits_at=last_B1).logits

    diagnosing = functools.partial(measure.diagnose, cfg=model.cfg)
    biases = jnp.array(BIASES)
    return {
        "ordinary": (jax.jit(ordinary), (model.params, tokens_BT, last_B1)),
        "diagnosing": (
            jax.jit(diagnosing),
            (model.params, tokens_BT, last_B1, jnp.zeros_like(last_B1), biases),
        ),
    }


def tokens(model: lm_jax.Pretrained, length: int) -> np.ndarray:
    """The first `length` tokens of a calibration text, as a batch of one."""
    return prompts(model, 1, length)[0]


def prompts(model: lm_jax.Pretrained, count: int, length: int) -> list[np.ndarray]:
    """Pieces of `length` tokens of the calibration texts, each a batch of one."""
    if model.tokenizer is None:
        raise BadInputError("--model has no tokenizer.json; name a model that has one")
    results: list[np.ndarray] = []
    for text in model_calibration.calibration_texts().values():
        ids = np.asarray(model.tokenizer.encode(text), np.int32)[None]
        starts = range(0, ids.shape[1] - length + 1, length)
        results += [ids[:, start : start + length] for start in starts]
        if len(results) >= count:
            return results[:count]
    raise BadInputError(f"the calibration texts make {len(results)} prompts of {length} tokens")


def against_torch(model: lm_jax.Pretrained, length: int, repeats: int) -> bool:
    """Times our forward against `transformers`; returns False if the logits disagree."""
    if reason := torch_llama.missing():
        print(f"forward / transformers: not measured, as {reason}")
        return True
    import torch

    tokens_BT = tokens(model, length)
    theirs = torch_llama.as_torch(model.cfg, model.params).eval()
    torch_tokens_BT = torch.tensor(tokens_BT, dtype=torch.long)

    @torch.inference_mode()
    def torch_forward() -> Any:
        return theirs(torch_tokens_BT, use_cache=False).logits

    expected = torch_forward().numpy()
    good = True
    for name, attend in (
        ("", lm_jax.softmax),
        (", fused attention", lm_jax.fused(lm_jax.softmax, "xla")),
    ):
        forward = jax.jit(
            lambda params, tokens_BT, attend=attend: (
                lm_jax.forward(params, tokens_BT, model.cfg, attend=attend).logits
            )
        )
        run = functools.partial(forward, model.params, jnp.asarray(tokens_BT))
        difference = float(np.abs(np.asarray(run()) - expected).max())
        label = f"forward{name} / transformers, {length} tokens, {torch.get_num_threads()} threads"
        if not front.agrees(label, difference, LOGIT_TOLERANCE, "logits differ by"):
            good = False
            continue
        pair = {
            "lm_jax": lambda run=run: run().block_until_ready(),
            "transformers": torch_forward,
        }
        front.timed(label, pair, repeats, over="transformers", pause=PAUSE)
        print(f"    logits differ by at most {difference:.1e}")
    return good


def against_hooks(model: lm_jax.Pretrained, count: int, length: int, repeats: int) -> bool:
    """Times ours against a hooked torch model on many prompts; False if S_p disagrees."""
    label = f"S_p of {count} prompts of {length} tokens, diagnosing / transformers with a hook"
    if reason := torch_llama.missing():
        print(f"{label}: not measured, as {reason}")
        return True
    import torch

    batches = prompts(model, count, length)
    diagnose, (params, _, last_B1, answers_B1, biases) = passes(model, jnp.asarray(batches[0]))[
        "diagnosing"
    ]
    theirs = ScoreRows(torch_llama.as_torch(model.cfg, model.params), DEGREES, BIASES)
    ours_in = [jnp.asarray(batch) for batch in batches]
    theirs_in = [torch.tensor(batch, dtype=torch.long) for batch in batches]

    def run_ours() -> list[measure.Diagnosis]:
        return jax.block_until_ready(
            [diagnose(params, batch, last_B1, answers_B1, biases) for batch in ours_in]
        )

    def run_theirs() -> list[Any]:
        return [theirs(batch)[0] for batch in theirs_in]

    worst = 0.0
    for result, expected in zip(run_ours(), run_theirs(), strict=True):
        stats = result.rows["argmax"]
        near = np.asarray(stats.r_star)[..., 0] > LEAST_TARGET
        mass = np.asarray(stats.target_mass)[..., 0, :]
        worst = max(worst, float(np.abs(mass - 1 / (1 + expected.numpy()))[near].max()))
    if not front.agrees(label, worst, MASS_TOLERANCE, "the target's mass differs by"):
        return False
    pair = {"lm_jax": run_ours, "transformers": run_theirs}
    front.timed(label, pair, repeats, over="transformers", pause=PAUSE)
    print(f"    1 / (1 + S_p) differs by at most {worst:.1e}")
    return True


def diagnosing_error(
    model: lm_jax.Pretrained, tokens_BT: jax.Array, result: measure.Diagnosis
) -> float:
    """Largest error of S_p against float64 on the recorded rows, as a multiple of its bound."""
    record = {"attn.scores": lambda scores_BNTS: scores_BNTS[:, :, -1:]}
    recorded = jax.jit(
        lambda params: lm_jax.forward(params, tokens_BT, model.cfg, record=record).records
    )(model.params)
    rows_LBNQS = np.asarray(recorded["attn.scores"], np.float64)
    exact = row_stats(rows_LBNQS, degrees=DEGREES)
    computed = np.asarray(result.rows["argmax"].s_p)[:, 0]
    active = exact.status == 1
    # The rows are recorded by another program, whose scores differ in their last bits.
    slack = 1e-4
    bounds = [relative_error_bound(p, rows_LBNQS.shape[-1]) + p * slack for p in DEGREES]
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(computed / exact.s_p - 1) / bounds
    return float(np.max(np.where(exact.s_p[active] > 1e-30, errors[active], 0.0)))


def diagnosing(model: lm_jax.Pretrained, length: int, repeats: int) -> bool:
    """Times the diagnosing against the ordinary forward; False if its numbers are wrong."""
    tokens_BT = jnp.asarray(tokens(model, length))
    runs = {
        name: functools.partial(fn, *arguments)
        for name, (fn, arguments) in passes(model, tokens_BT).items()
    }
    label = f"diagnosing / ordinary forward, {length} tokens"
    error = diagnosing_error(model, tokens_BT, runs["diagnosing"]())
    if not front.agrees(label, error, 1.0, "the error of S_p over its bound is"):
        return False
    pair = {
        "ordinary": lambda: jax.block_until_ready(runs["ordinary"]()),
        "diagnosing": lambda: jax.block_until_ready(runs["diagnosing"]()),
    }
    front.timed(label, pair, repeats, pause=PAUSE)
    print(f"    the error of S_p is {error:.1g} of its bound")
    return True


def program_memory(model: lm_jax.Pretrained, length: int) -> None:
    """Prints the memory that the compiled programs allocate in addition to their arguments."""
    sizes = {}
    for name, (fn, arguments) in passes(model, jnp.zeros((1, length), jnp.int32)).items():
        analysis = fn.lower(*arguments).compile().memory_analysis()
        sizes[name] = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    ratio = sizes["diagnosing"] / sizes["ordinary"]
    print(f"program memory, diagnosing / ordinary forward, {length} tokens: {ratio:.2f}")
    for name, size in sizes.items():
        print(f"    {name:24} {size / 2**20:8.0f} MiB of temporaries and outputs")


def peak_of(name: str, source: str, length: int) -> int:
    """Peak resident size in bytes of this process during one pass, weights included."""
    model = lm_jax.load_pretrained(source)
    fn, arguments = passes(model, jnp.asarray(tokens(model, length)))[name]
    # Loading and compiling have a peak of their own; 5 resets the mark (proc(5), clear_refs).
    compiled = fn.lower(*arguments).compile()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    jax.block_until_ready(compiled(*arguments))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def process_memory(source: str, length: int) -> None:
    """Prints the peak resident size of a process for each of the two passes."""
    label = f"process memory, diagnosing / ordinary forward, {length} tokens"
    if not Path("/proc/self/clear_refs").exists():
        print(f"{label}: not measured, as only Linux can reset the peak")
        return
    peaks = {}
    for name in PASSES:
        command = [sys.executable, "-m", "tools.bench.audit", "--model", source]
        command += ["--memory-length", str(length), "--peak-of", name]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        # The conditions stand before it.
        peaks[name] = int(process.stdout.split()[-1])
    print(f"{label}: {peaks['diagnosing'] / peaks['ordinary']:.2f}")
    for name, peak in peaks.items():
        print(f"    {name:24} {peak / 2**20:8.0f} MiB resident, weights included")


def run(arguments: argparse.Namespace, _: front.Record) -> bool:
    """Compares and times all of it; false where something disagrees."""
    if arguments.peak_of:
        print(peak_of(arguments.peak_of, arguments.model, arguments.memory_length))
        return True
    model = lm_jax.load_pretrained(arguments.model)
    print(f"{arguments.model}, float32\n")
    good = against_torch(model, arguments.length, arguments.repeats)
    many = arguments.prompts, arguments.prompt_length
    good = against_hooks(model, *many, arguments.repeats) and good
    good = diagnosing(model, arguments.length, arguments.repeats) and good
    for length in (arguments.memory_length, arguments.longest):
        program_memory(model, length)
    process_memory(arguments.model, arguments.memory_length)
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")
    return good


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = front.parser("bench.audit", __doc__, repeats=7, kept=False)
    parser.add_argument("--model", default="smollm2", help="HF folder, GGUF file, or manifest name")
    parser.add_argument("--length", type=int, default=512, help="tokens where time is measured")
    parser.add_argument("--prompts", type=int, default=20, help="prompts for the hooked model")
    parser.add_argument("--prompt-length", type=int, default=140, help="tokens of each prompt")
    parser.add_argument("--memory-length", type=int, default=1024, help="tokens for memory")
    parser.add_argument(
        "--longest", type=int, default=4096, help="tokens for a program that is compiled, not run"
    )
    parser.add_argument("--peak-of", choices=PASSES, help=argparse.SUPPRESS)
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

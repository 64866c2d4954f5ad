"""Time and memory of the Prototype Transformer relative to its baselines, measured in one run.

    python -m tools.bench.train                         default config, this device
    python -m tools.bench.train --batch 128 --models protot llama mamba deltanet
    python -m tools.bench.train --dtype float32 --dropout 0 0.1 --against torch
    python -m tools.bench.train --shapes protot/throughput --batch 32 128 --lengths --prompts
    python -m tools.bench.train --decoders protot llama mamba deltanet --lengths
    python -m tools.bench.train --study protot/ablations_cpu:small --rows default taps_7

1. A training step, weights and moments in float32: seconds, samples/s, temporary memory of the
   compiled program, without evaluation. `--shapes` has the sizes of a config of
   `protot_jax.training.count`, such as the untied models of Table 13. `--against torch` adds
   transformers' Llama, eager and compiled (`bench/torch_llama.py`). `--study` times rows of a
   config of `iaj protot study` in place of all this.
2. Forward passes at batch 1 by length (Table 14, which is prefill, not decoding); on a GPU LLaMA
   also with cuDNN's attention in place of ours.
3. Decoding after prompts of growing length: tokens/s and the bytes of the cache, both of which
   should be constant for a recurrent mixer. The cache of attention has a place for each token of
   the prompt and the continuation. A step writes into the cache that it was given.

Models run in turns, so that load on the machine affects all; the median ratio is printed with its
range. Before timing, every untrained loss is compared with ln V, torch's loss with ours on the same
weights, and decoded logits with those of the parallel pass; if one is wrong, nothing is timed and
the exit code is 1.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from pathlib import Path
import statistics
import sys
from typing import Any

import jax
import numpy as np

from lm_jax.console.config_files import load_config
from lm_jax.errors import UsageError, UserError
from lm_jax.model.decoder import count_params
from lm_jax.parallel import sharding
from lm_jax.run.config import from_plain
from lm_jax.run.files import write_json
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import LanguageModelling, token_loss
from lm_jax.train.state import StateLayout
from lm_jax.train.step import make_eval_step, make_train_step
from protot_jax.mixers import models
from protot_jax.training import pretrain
from protot_jax.training.config import PretrainConfig
from protot_jax.training.count import CountConfig
from tools.bench import torch_llama
from tools.bench.decoding import bench_decode
from tools.bench.forward import bench_forward
from tools.bench.shapes import BenchConfig, build, of_study, random_params
from tools.bench.timing import PROFILE, conditions, in_turns, profiled, ratio

CONFIG = "configs/protot/default.py"
# Of torch's untrained loss, relative to ours.
TOLERANCE = 1e-4
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
SETTINGS = TrainConfig(steps=1_000, learning_rate=1e-3)
# Seconds of rest before each run, because torch's idle threads would spin on our cores, and of
# untimed steps: at least one, because the first after another program took up to 1.4 times as long.
PAUSE, SETTLE = 0.5, 0.1


class Step:
    """A training step that continues from its own result, as training does."""

    def __init__(self, name: str, config: BenchConfig) -> None:
        cfg, mixer = build(name, config)
        mesh = sharding.make_mesh(devices=jax.devices()[:1])
        settings = SETTINGS
        objective = LanguageModelling(
            cfg, mixer, dtype=config.dtype, dropout=config.dropout, casts=pretrain.casts
        )
        step = make_train_step(objective, mesh, settings, decays=pretrain.decays)
        layout = StateLayout.of(objective, mesh, settings, pretrain.decays)
        self.state = layout.init(jax.random.key(0))
        self.tokens = sharding.shard_batch(mesh, random_batch(config, cfg.vocab_size))
        sums = make_eval_step(objective, mesh)(self.state.params, (), self.tokens)
        self.loss, self.guess = float(sums["loss"]) / int(sums["tokens"]), math.log(cfg.vocab_size)
        self._key = jax.random.key(1)
        donating = jax.jit(step, donate_argnums=0)
        self._step = donating.lower(self.state, (), self.tokens, self._key).compile()
        analysis: Any = self._step.memory_analysis()
        self.bytes = analysis.temp_size_in_bytes

    def __call__(self) -> None:
        self.state, metrics = self._step(self.state, (), self.tokens, self._key)
        jax.block_until_ready(metrics)


def random_batch(config: PretrainConfig, vocab_size: int) -> np.ndarray:
    """The batch of every program: random ids, int32 `[B, T + 1]`."""
    shape = (config.batch_size, config.context + 1)
    return np.random.default_rng(0).integers(1, vocab_size, shape, np.int32)


def bench_steps(
    names: Sequence[str],
    config: BenchConfig,
    repeats: int,
    *,
    rates: Sequence[float],
    against: str | None,
) -> dict[str, Any] | None:
    """`time_steps` of models at each dropout rate, beside torch's `against`."""
    rows = {
        name if len(rates) == 1 else f"{name}, dropout {rate:g}": dataclasses.replace(
            config, model=name, dropout=rate
        )
        for rate in rates
        for name in names
    }
    return time_steps(rows, repeats, functools.partial(torch_steps, config) if against else None)


def time_steps(
    rows: Mapping[str, BenchConfig],
    repeats: int,
    baselines: Callable[[], dict[str, torch_llama.TorchStep] | None] | None = None,
) -> dict[str, Any] | None:
    """Times the training steps of labelled configs in turns.

    Returns:
      Seconds of every turn and temporary bytes, by label; None, with a line printed, if an
      untrained loss is wrong.
    """
    steps: dict[str, Any] = {}
    for label, config in rows.items():
        step = steps[label] = Step(config.model, config)
        if not abs(step.loss - step.guess) <= 0.1 * step.guess:
            print(f"{label}: an untrained loss of {step.loss:.3f}, not about {step.guess:.3f}")
            return None
    if baselines:
        others = baselines()
        if others is None:
            return None
        steps |= others
    labels, first = list(steps), next(iter(steps))
    runs = in_turns(list(steps.values()), repeats, PAUSE if baselines else 0.0, SETTLE)
    seconds = dict(zip(labels, runs, strict=True))
    memory = {label: step.bytes for label, step in steps.items() if isinstance(step, Step)}
    config = rows[first]
    dropped = (
        f", dropout {config.dropout:g}" if len({r.dropout for r in rows.values()}) == 1 else ""
    )
    print(
        f"training step, batch {config.batch_size} x {config.context}, {config.dtype}{dropped}; "
        f"ratios are over {first}"
    )
    for label in labels:
        needed = ""
        if label in memory:
            share = memory[label] / memory[first]
            needed = f"  {memory[label] / 2**20:6.0f} MiB  memory ratio {share:.2f}"
        print(
            f"  {label:22} {statistics.median(seconds[label]) * 1e3:8.1f} ms  "
            f"{config.batch_size / statistics.median(seconds[label]):7.1f} samples/s  "
            f"time ratio {ratio(seconds[label], seconds[first])}{needed}"
        )
    return {"seconds": seconds, "temporary_bytes": memory}


def torch_steps(config: BenchConfig) -> dict[str, torch_llama.TorchStep] | None:
    """Steps of transformers' Llama; None and a printed line if its loss differs from ours."""
    cfg, mixer = build("llama", config)
    params = random_params(cfg, mixer, "float32")
    tokens_BS = random_batch(config, cfg.vocab_size)
    total, count = jax.jit(token_loss, static_argnums=(2, 3))(params, tokens_BS, cfg, mixer)
    ours = float(total) / int(count)
    baselines = {}
    for label, compiled in (("torch llama", False), ("torch.compile llama", True)):
        step = torch_llama.TorchStep(cfg, params, tokens_BS, SETTINGS, compiled=compiled)
        if not abs(step.loss - ours) <= TOLERANCE * ours:
            print(f"{label}: loss {step.loss:.6f} on the weights that give ours {ours:.6f}")
            return None
        baselines[label] = step
    return baselines


def _bench_batches(
    names: Sequence[str], config: BenchConfig, batches: Sequence[int], repeats: int, **options: Any
) -> dict[str, Any] | None:
    """`bench_steps` for each batch size; where there are several, labels name them."""
    results: dict[str, Any] = {}
    for batch in batches:
        own = dataclasses.replace(config, batch_size=batch)
        measured = bench_steps(names, own, repeats, **options)
        if measured is None:
            return None
        for quantity, by_label in measured.items():
            kept = results.setdefault(quantity, {})
            for label, value in by_label.items():
                kept[label if len(batches) == 1 else f"{label}, batch {batch}"] = value
    return results


def _keep(file: Path | None, results: dict[str, Any]) -> None:
    """Writes what is measured so far, for a session whose time may run out."""
    if file:
        write_json(file, results)


@profiled
def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[PROFILE])
    parser.add_argument("--config", default=CONFIG, help="of iaj protot pretrain")
    parser.add_argument("--models", nargs="+", default=["protot", "llama"], choices=models.MODELS)
    parser.add_argument(
        "--shapes", help="config of protot_jax.training.count with other sizes and tied models"
    )
    parser.add_argument("--study", help="a study whose training steps are timed, and nothing else")
    parser.add_argument("--rows", nargs="+", help="of the study, the one to compare with first")
    parser.add_argument("--batch", type=int, nargs="+", help="sizes, instead of the config's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of the config's")
    parser.add_argument("--dropout", type=float, nargs="+", help="rates, instead of the config's")
    parser.add_argument("--against", choices=("torch",), help="further baseline")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2_048, 4_096, 8_192])
    parser.add_argument("--calls", type=int, default=1, help="forward passes of one timing")
    parser.add_argument("--prompts", type=int, nargs="*", default=[1_024, 16_384, 131_072])
    parser.add_argument(
        "--decoders",
        nargs="+",
        default=["protot"],
        choices=models.MODELS,
        help="models whose decoding is timed",
    )
    parser.add_argument("--decoded", type=int, default=100, help="tokens decoded in a turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the raw timings")
    arguments = parser.parse_args(argv)
    # Ratios are to ProtoT.
    names = ["protot", *(name for name in arguments.models if name != "protot")]
    try:
        if arguments.against and (reason := torch_llama.missing()):
            raise UsageError(f"--against={arguments.against}: {reason}")
        if arguments.rows and not arguments.study:
            raise UsageError("--rows names rows of a study; name it too, by --study")
        others = ("shapes", "batch", "dtype", "dropout", "against")
        if arguments.study and (given := [f"--{x}" for x in others if getattr(arguments, x)]):
            raise UsageError(
                "--study times the rows as the study has them; leave out " + ", ".join(given)
            )
        settings = load_config(arguments.config)
        with settings.unlocked():
            settings.dtype = arguments.dtype or settings.dtype
        config = from_plain(settings, BenchConfig)
        if arguments.shapes:
            config = config.with_shapes(from_plain(load_config(arguments.shapes), CountConfig))
        if arguments.against and config.dtype != "float32":
            raise UsageError(
                f"--against={arguments.against} compares in float32: add --dtype float32"
            )
        results: dict[str, Any] = {"conditions": conditions(PACKAGES)}
        for name, value in results["conditions"].items():
            print(f"{name}: {value}")
        if arguments.study:
            rows = of_study(arguments.study, arguments.rows)
            results["step"] = time_steps(rows, arguments.repeats)
            _keep(arguments.json, results)
            return 0 if results["step"] else 1
        results["parameters"] = {
            name: count_params(cfg, mixer=mixer)
            for name in dict.fromkeys([*names, *arguments.decoders])
            for cfg, mixer in [build(name, config)]
        }
        for name, count in results["parameters"].items():
            print(f"{name}: {count:,} parameters")
        results["step"] = _bench_batches(
            names,
            config,
            arguments.batch or [config.batch_size],
            arguments.repeats,
            rates=arguments.dropout or [config.dropout],
            against=arguments.against,
        )
        if results["step"] is None:
            return 1
        _keep(arguments.json, results)
        if arguments.lengths:
            forward = (names, config, arguments.lengths, arguments.repeats, arguments.calls)
            for measured in bench_forward(*forward):
                # Not "forward", which files from before have, without the head.
                results["forward_all_logits"] = measured
                _keep(arguments.json, results)
        if arguments.prompts:
            results["decode"] = bench_decode(
                config,
                arguments.prompts,
                arguments.decoded,
                arguments.repeats,
                list(dict.fromkeys(arguments.decoders)),
            )
            if results["decode"] is None:
                return 1
            _keep(arguments.json, results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

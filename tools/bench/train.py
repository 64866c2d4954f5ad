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
   transformers' Llama, eager and compiled (`bench/in_torch/llama.py`). `--study` times rows of a
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
import sys
from typing import Any

import jax
import numpy as np

from lm_jax.console.config_files import load_config
from lm_jax.errors import UsageError
from lm_jax.model.decoder import count_params
from lm_jax.parallel import sharding
from lm_jax.run.config import from_plain
from lm_jax.train.config import TrainConfig
from lm_jax.train.objective import LanguageModelling, token_loss
from lm_jax.train.state import StateLayout
from lm_jax.train.step import make_eval_step, make_train_step
from protot_jax.mixers import models
from protot_jax.training import pretrain
from protot_jax.training.config import PretrainConfig
from protot_jax.training.count import CountConfig
from tools.bench import front
from tools.bench.decoding import bench_decode
from tools.bench.forward import bench_forward
from tools.bench.in_torch import llama as torch_llama
from tools.bench.shapes import BenchConfig, build, of_study, random_params

CONFIG = "configs/protot/default.py"
# Of torch's untrained loss, relative to ours.
TOLERANCE = 1e-4
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
        off, guess = abs(step.loss - step.guess), step.guess
        what = f"an untrained loss of {step.loss:.3f}, for about {guess:.3f}, is off by"
        if not front.agrees(label, off, 0.1 * guess, what):
            return None
    if baselines:
        others = baselines()
        if others is None:
            return None
        steps |= others
    memory = {label: step.bytes for label, step in steps.items() if isinstance(step, Step)}
    config, *others = rows.values()
    same = all(other.dropout == config.dropout for other in others)
    seconds = front.timed(
        f"training step, batch {config.batch_size} x {config.context}, {config.dtype}"
        f"{f', dropout {config.dropout:g}' if same else ''}",
        steps,
        repeats,
        pause=PAUSE if baselines else 0.0,
        settle=SETTLE,
        rows=config.batch_size,
        memory=memory,
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
        what = f"loss {step.loss:.6f} on the weights that give ours {ours:.6f} is off by"
        if not front.agrees(label, abs(step.loss - ours), TOLERANCE * ours, what):
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


def _config(arguments: argparse.Namespace) -> BenchConfig:
    """The config of the models as the flags ask for it.

    Raises:
      UsageError: flags that do not go together, or torch is not installed.
    """
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
        raise UsageError(f"--against={arguments.against} compares in float32: add --dtype float32")
    return config


def run(arguments: argparse.Namespace, record: front.Record) -> bool:
    """Times training steps, forward passes and decoding; false where something disagrees."""
    config, repeats = _config(arguments), arguments.repeats
    if arguments.study:
        return record.keep("step", time_steps(of_study(arguments.study, arguments.rows), repeats))
    # Ratios are to ProtoT.
    names = ["protot", *(name for name in arguments.models if name != "protot")]
    counts = {
        name: count_params(cfg, mixer=mixer)
        for name in dict.fromkeys([*names, *arguments.decoders])
        for cfg, mixer in [build(name, config)]
    }
    for name, count in counts.items():
        print(f"{name}: {count:,} parameters")
    record.results["parameters"] = counts
    measured = _bench_batches(
        names,
        config,
        arguments.batch or [config.batch_size],
        repeats,
        rates=arguments.dropout or [config.dropout],
        against=arguments.against,
    )
    if not record.keep("step", measured):
        return False
    lengths = arguments.lengths
    for forward in bench_forward(names, config, lengths, repeats, arguments.calls):
        # Not "forward", which files from before have, without the head.
        record.keep("forward_all_logits", forward)
    if not arguments.prompts:
        return True
    decoders = list(dict.fromkeys(arguments.decoders))
    decoded = bench_decode(config, arguments.prompts, arguments.decoded, repeats, decoders)
    return record.keep("decode", decoded)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = front.parser("bench.train", __doc__, repeats=5)
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
    return front.run(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

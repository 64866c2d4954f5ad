"""Effect of the released code's arithmetic of the prefix mean on a trained ProtoT.

    python -m tools.compare_arithmetic --workdir=runs/arithmetic

1. Trains configs/protot/arithmetic.py at each context with the exact prefix mean and with the
   arithmetic of the authors' released code (`protot_jax.mixers.reference_code`), for every seed of
   the config; existing runs are not trained again.
2. Evaluates every model with both arithmetics on the same validation rows, with intervals over
   rows: the cost of training with it, and its effect on a model trained without it.
3. Measures what it forgets: the share of the read gates on prototypes whose discount is lost
   (beta^i below 1e-12) or whose mass is clamped (below 1e-6), by position.

Writes comparison.json into the work folder and prints a table.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from iaj.parser import Parser, run_parsed
from iaj_kernels.prefix_mean.api import prefix_mean
import lm_jax
from lm_jax import statistics
from lm_jax.console import terminal
from lm_jax.console.config_files import load_config
from lm_jax.model import sites
from lm_jax.run.config import from_plain
from lm_jax.run.files import write_json
from protot_jax.mixers import reference_code
from protot_jax.mixers.gate_statistics import half_life
from protot_jax.studies.pretraining.run import run_in
from protot_jax.training import saved_run
from protot_jax.training.config import PretrainConfig
from tools.bench.timing import conditions

CONFIG = "configs/protot/arithmetic.py"
ARITHMETICS = ("exact", "released")
CONTEXTS = (256, 1024)
BINS = 8
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Rows at a time: the exact mean of few rows is as fast, and logits are large.
ROWS = 4
RESULT = "comparison.json"


def train(folder: Path, mode: str, context: int, arithmetic: str) -> None:
    """Trains one setting in its own folder, unless it is already trained there."""
    config = load_config(f"{CONFIG}{mode}")
    with config.unlocked():
        # The same number of tokens in a batch at every context.
        tokens = config.batch_size * config.context
        config.update(context=context, batch_size=max(1, tokens // context), arithmetic=arithmetic)
    run_in(config, folder / f"{context}_{arithmetic}")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Losses `[N, T]` of validation rows by arithmetic, and shares of forgotten read gates.

    `undiscounted_T` and `clamped_T` are shares of the read gates, means over rows and layers.
    """

    losses: Mapping[str, np.ndarray]
    undiscounted_T: np.ndarray
    clamped_T: np.ndarray


def measure(model: saved_run.TrainedModel, tokens_NS: np.ndarray) -> Measured:
    """Evaluates both arithmetics on the same rows."""
    prefixes = {"exact": prefix_mean, "released": reference_code.released_prefix_mean}
    losses = {}
    for name, prefix in prefixes.items():
        mixer = dataclasses.replace(model.prototypes, prefix=prefix)
        loss = jax.jit(functools.partial(_losses, cfg=model.cfg, mixer=mixer))
        losses[name] = np.concatenate([loss(model.params, rows) for rows in _parts(tokens_NS)])
    keep = {"mixer.write": sites.keep, "mixer.read": sites.keep}
    gates = jax.jit(
        lambda params, rows: (
            lm_jax.forward(params, rows[:, :-1], model.cfg, mixer=model.mixer, record=keep).records
        )
    )
    decay_LR = jax.nn.sigmoid(model.params["blocks"]["mixer"]["decay_logit"])
    results = [forgotten(gates(model.params, rows), decay_LR) for rows in _parts(tokens_NS)[:ROWS]]
    undiscounted_T, clamped_T = (np.mean(each, 0) for each in zip(*results, strict=True))
    return Measured(losses, undiscounted_T, clamped_T)


def _parts(tokens_NS: np.ndarray) -> list[np.ndarray]:
    whole = len(tokens_NS) // ROWS * ROWS
    return np.split(tokens_NS[:whole], whole // ROWS)


def _losses(params: Any, rows_BS: jax.Array, *, cfg: Any, mixer: Any) -> jax.Array:
    logits = lm_jax.forward(params, rows_BS[:, :-1], cfg, mixer=mixer).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows_BS[:, 1:])


@jax.jit
def forgotten(gates: Mapping[str, jax.Array], decay_LR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shares `[T]` of the read gates without discount, and with a clamped mass.

    Step i reads the sum up to step i - 1; the first step reads nothing.
    """
    write_LBTR, read_LBTR = gates["mixer.write"], gates["mixer.read"]
    T = write_LBTR.shape[2]
    decay_L11R = decay_LR[:, None, None]
    power_L1TR = decay_L11R ** jnp.arange(T, dtype=jnp.float32)[None, None, :, None]
    summed = jnp.cumsum(write_LBTR / (power_L1TR + reference_code.EPSILON), axis=2)
    mass_LBTR = (1.0 - decay_L11R) * power_L1TR * summed
    lost = power_L1TR[:, :, :-1] < reference_code.EPSILON
    clamped = mass_LBTR[:, :, :-1] < reference_code.LEAST_MASS

    def share(where: jax.Array) -> jax.Array:
        shares_T = jnp.sum(jnp.where(where, read_LBTR[:, :, 1:], 0.0), -1).mean((0, 1))
        return jnp.concatenate([jnp.zeros(1), shares_T])

    return share(lost), share(clamped)


def compare(folder: Path, context: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The numbers of one context, an entry per seed."""
    results = []
    for seed in seeds:
        # The last weights, so that all are compared after the same number of updates.
        models = {
            name: saved_run.load_run(folder / f"{context}_{name}", seed=seed, best=False)
            for name in ARITHMETICS
        }
        run = folder / f"{context}_exact" / saved_run.DATA
        validation = saved_run.load_data(models["exact"].config, run).validation
        tokens_NS = validation.read(np.arange(validation.count))["tokens"]
        measured = {name: measure(model, tokens_NS) for name, model in models.items()}
        own = {name: measured[name].losses[name] for name in ARITHMETICS}
        swapped = measured["exact"].losses["released"]
        results.append(
            {
                "context": context,
                "seed": seed,
                "rows": len(own["exact"]),
                "perplexity": {
                    f"trained_{a}_evaluated_{b}": float(np.exp(measured[a].losses[b].mean()))
                    for a in ARITHMETICS
                    for b in ARITHMETICS
                },
                # In nats per token; above 0 the released arithmetic is worse.
                "trained_with_it": _difference(own["released"] - own["exact"]),
                "swapped_in": _difference(swapped - own["exact"]),
                "undiscounted": _binned(measured["released"].undiscounted_T),
                "clamped": _binned(measured["released"].clamped_T),
                "undiscounted_if_swapped": _binned(measured["exact"].undiscounted_T),
                "clamped_if_swapped": _binned(measured["exact"].clamped_T),
                "half_lives": {
                    name: np.quantile(
                        half_life(model.params["blocks"]["mixer"]["decay_logit"]), QUARTILES
                    ).tolist()
                    for name, model in models.items()
                },
            }
        )
    return results


def _difference(delta_NT: np.ndarray) -> dict[str, Any]:
    rows = np.arange(len(delta_NT))
    bins = np.array_split(delta_NT, BINS, axis=1)
    each = [
        statistics.clustered_bootstrap(part.mean(1), rows, seed=0) for part in (delta_NT, *bins)
    ]
    whole, *parts = (dataclasses.asdict(interval) for interval in each)
    return {"whole": whole, "by_position": parts}


def _binned(share_T: np.ndarray) -> list[float]:
    return [float(part.mean()) for part in np.array_split(share_T, BINS)]


def format_entries(entries: Sequence[Mapping[str, Any]]) -> str:
    """The table for a terminal."""
    columns = (
        "context",
        "seed",
        "perplexity exact",
        "released",
        "loss difference [95 % over rows]",
    )
    columns += ("loss difference [95 % over rows]", "swapped in", "reads undiscounted", "clamped")
    rows = []
    for entry in entries:
        perplexity, whole = entry["perplexity"], entry["trained_with_it"]["whole"]
        swap = entry["swapped_in"]["whole"]["estimate"]
        rows.append(
            (
                str(entry["context"]),
                str(entry["seed"]),
                f"{perplexity['trained_exact_evaluated_exact']:.2f}",
                f"{perplexity['trained_released_evaluated_released']:.2f}",
                f"{whole['estimate']:+.4f} [{whole['low']:+.4f}, {whole['high']:+.4f}]",
                f"{swap:+.4f}",
                f"{np.mean(entry['undiscounted']):.3f}",
                f"{np.mean(entry['clamped']):.3f}",
            )
        )
    return terminal.format_table(columns, rows, left=())


def run(chosen: argparse.Namespace) -> None:
    """Trains, compares and prints."""
    mode = ":smoke" if chosen.smoke else ""
    contexts = (32,) if chosen.smoke else CONTEXTS
    chosen.workdir.mkdir(parents=True, exist_ok=True)
    for context in contexts:
        for arithmetic in ARITHMETICS:
            train(chosen.workdir, mode, context, arithmetic)
    seeds = from_plain(load_config(f"{CONFIG}{mode}"), PretrainConfig).seeds
    entries = [each for context in contexts for each in compare(chosen.workdir, context, seeds)]
    write_json(chosen.workdir / RESULT, {"conditions": conditions(), "entries": entries})
    print(format_entries(entries))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = Parser("python -m tools.compare_arithmetic", __doc__)
    parser.add_argument("--workdir", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--smoke", action="store_true", help="runs of seconds, to see that it works"
    )
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Searches learning rate and batch size with Optuna, each trial trained at every seed.

    iaj protot search --config=protot/search --workdir=runs/search
    iaj protot search --config=protot/search --config.sampler=tpe --workdir=runs/search_tpe

Prototype Transformer, section 4: 50 trials over learning rates from 3e-5 to 3e-2, uniform in their
logarithm, and batch sizes of 32, 64 and 128; the first 15 are drawn at random, the others by
Optuna's BoTorchSampler (a Gaussian process, and the largest expected improvement under it). A
trial's value is the mean over three seeds of the lowest validation perplexity.

1. A trial is a function of the trials before it (`search_space.propose`), and is saved first.
2. It is trained. An interrupted trial resumes from its checkpoint, and a finished one is not
   repeated, so that a search killed at any time and started again ends with the same trials.
3. A trial that diverges is recorded with the reason, and the search continues. A trial above
   `most_flops` is recorded but not trained, and does not count towards `trials`.

The work folder has

    data/                   the prepared corpus
    trials/<number>.json    a trial: settings, status, perplexity of each seed (`results.Trial`)
    trials/<number>/        a run of `iaj protot pretrain`
    search.parquet          a row per trial (`SCHEMA`)
    search.json             all trials and the best one (`results.SearchSummary`)
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import math
from pathlib import Path
import shlex
import statistics
from typing import Any

import jax
import pyarrow as pa

from lm_jax.console import cli, terminal
from lm_jax.errors import DivergedError, UsageError
from lm_jax.run import stop
from lm_jax.run.config import config_hash, from_plain
from lm_jax.run.files import write_json
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import open_workdir
from protot_jax.studies.pretraining.run import run_in
from protot_jax.training import diverged
from protot_jax.training.config import PretrainConfig, with_fields
from protot_jax.training.results import SearchSummary, Trial
from protot_jax.training.saved_run import DATA
from protot_jax.training.search_space import SearchConfig, check, forward_flops, propose
from protot_jax.training.seeds import over_seeds

SUMMARY, ROWS, TRIALS = "search.json", "search.parquet", "trials"
SCHEMA = pa.schema(
    {
        "trial": pa.int64(),
        "status": pa.string(),
        "learning_rate": pa.float64(),
        "batch_size": pa.int64(),
        # The other fields that were searched, as a JSON object.
        "choices": pa.string(),
        # Forward, of one example.
        "flops": pa.int64(),
        "perplexity": pa.float64(),
        # In the order of the config.
        "seed_perplexities": pa.list_(pa.float64()),
        "reason": pa.string(),
    }
)
# Trials that the terminal lists.
_MOST_ROWS = 10

# Maps the config and the folder of a trial to the validation perplexity of each seed.
Measure = Callable[[PretrainConfig, Path], Sequence[float]]


def train(config: PretrainConfig, folder: Path) -> list[float]:
    """Pretrains every seed of a trial and returns their lowest validation perplexities."""
    summary = run_in(config, folder, data=folder.parent.parent / DATA)
    # The compiled programs of every seed would add up to gigabytes over a search.
    jax.clear_caches()
    return [seed.best.validation_perplexity for seed in summary.seeds]


def run(config: SearchConfig, folder: Path, measure: Measure = train) -> SearchSummary:
    """Runs or resumes a search in an open work folder and returns its trials and the best one.

    Args:
      config: settings of the search, which `check` has passed.
      folder: the work folder.
      measure: trains a trial and returns the perplexity of each seed.

    Raises:
      UsageError: the folder holds a trial that this search could not have drawn.
      CorruptError: the file of a trial is damaged.
      DivergedError: every trial diverged; the summary is written.
      StoppedError: a stop was requested.
    """
    (folder / TRIALS).mkdir(exist_ok=True)
    seeds = {f"run {i}": seed for i, seed in enumerate(config.base.seeds)}
    record_provenance(folder, collect_provenance(seeds=seeds, dtype=config.base.dtype))
    trials: list[Trial] = []
    while sum(trial.status != "refused" for trial in trials) < config.trials:
        stop.check(f"before trial {len(trials)}")
        trials.append(_trial(config, folder, trials, measure))
    best = next(iter(_ranked(trials)), None)
    summary = SearchSummary(
        sampler=config.sampler,
        seeds=config.base.seeds,
        best=best,
        flags=None if best is None else flags(best.drawn),
        trials=tuple(trials),
    )
    write_table(folder / ROWS, pa.Table.from_pylist(list(_rows(trials)), SCHEMA))
    write_json(folder / SUMMARY, summary)
    if best is None:
        first = next(trial for trial in trials if trial.status == "diverged")
        raise DivergedError(
            f"all {config.trials} trials diverged, trial {first.trial} with: {first.reason}; "
            "lower config.learning_rate[1] or set config.base.clip_norm, in another --workdir"
        )
    return summary


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that are done, of lowest perplexity first."""
    values = [(trial.perplexity, trial) for trial in trials if trial.perplexity is not None]
    return [trial for _, trial in sorted(values, key=lambda pair: pair[0])]


def _trial(config: SearchConfig, folder: Path, before: Sequence[Trial], measure: Measure) -> Trial:
    """The trial after those `before`, drawn and trained unless it is on disk."""
    number = len(before)
    place = folder / TRIALS / f"{number:03}"
    path = place.with_suffix(".json")
    if path.exists():
        trial = load_result(path, Trial)
        _check_own(config, trial, path)
    else:
        drawn = propose(config, before)
        own = with_fields(config.base, drawn)
        flops = forward_flops(own)
        trial = Trial(number, "running", drawn, flops, config_hash(own))
        if 0 < config.most_flops < flops:
            reason = f"{flops:.3g} FLOPs forward, above config.most_flops = {config.most_flops:.3g}"
            trial = dataclasses.replace(trial, status="refused", reason=reason)
        write_json(path, trial)
    if trial.status == "running":
        print(f"trial {number}: {flags(trial.drawn)}", flush=True)
        trial = _train(trial, with_fields(config.base, trial.drawn), place, measure)
        write_json(path, trial)
    return trial


def _train(trial: Trial, own: PretrainConfig, place: Path, measure: Measure) -> Trial:
    """The trial with its outcome."""
    try:
        perplexities = tuple(measure(own, place))
    except DivergedError as error:
        return dataclasses.replace(trial, status="diverged", reason=diverged.reason(error, place))
    mean = statistics.mean(perplexities)
    if not math.isfinite(mean):
        reason = f"the mean validation perplexity is {mean}"
        return dataclasses.replace(trial, status="diverged", reason=reason)
    return dataclasses.replace(
        trial, status="done", perplexity=mean, seed_perplexities=perplexities
    )


def _check_own(config: SearchConfig, trial: Trial, path: Path) -> None:
    drawn, values = trial.drawn, config.values()
    low, high = config.learning_rate
    rate = drawn.get("learning_rate")
    inside = drawn.keys() == {"learning_rate", *values}
    inside = inside and isinstance(rate, float) and low <= rate <= high
    inside = inside and all(drawn[name] in choices for name, choices in values.items())
    if not inside or trial.config_hash != config_hash(with_fields(config.base, drawn)):
        raise UsageError(
            f"{path} is a trial of another search; continue with its settings, or choose another "
            "--workdir"
        )


def _rows(trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    for trial in trials:
        others = dict(trial.drawn)
        own = {name: others.pop(name) for name in ("learning_rate", "batch_size")}
        yield dataclasses.asdict(trial) | own | {"choices": json.dumps(others)}


def flags(drawn: Mapping[str, Any]) -> str:
    """The settings of a trial as flags of `iaj protot pretrain`."""
    return shlex.join(f"--config.{name}={value}" for name, value in drawn.items())


def format_summary(summary: SearchSummary) -> str:
    """The best trials for a terminal."""
    ended = collections.Counter(trial.status for trial in summary.trials)
    lines = [
        f"{ended['done']} trials finished, {ended['diverged']} diverged, {ended['refused']} were "
        "above the limit of FLOPs",
        "lowest validation perplexity, mean over seeds:",
    ]
    rows = [
        (str(each.trial), str(over_seeds(each.seed_perplexities or ())), flags(each.drawn))
        for each in _ranked(summary.trials)[:_MOST_ROWS]
    ]
    lines.append(terminal.format_table(("trial", "mean over seeds", "flags"), rows, left=(1, 2)))
    return "\n".join([*lines, f"best: {summary.flags}"])


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, SearchConfig)
    check(config)
    with open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as workdir:
        print(format_summary(run(config, workdir.path)))


if __name__ == "__main__":
    cli.app(main, config="protot/search", config_class=SearchConfig, training=True)

"""Searches learning rate and batch size, every trial trained at every seed, and tells the best.

    iaj protot search --config=protot/search --workdir=runs/search
    iaj protot search --config=protot/search --config.sampler=tpe --workdir=runs/search_tpe

Prototype Transformer, section 4: 50 trials over learning rates from 3e-5 to 3e-2, uniform in their
logarithm, and batch sizes of 32, 64 and 128; the first 15 are drawn at random, the others by
Optuna's BoTorchSampler (a Gaussian process, and the largest expected improvement under it). A
trial's value is the mean over three seeds of the lowest validation perplexity.

1. A trial is drawn from the trials before it alone (`search_space.propose`), and written down. 2.
It is trained. One that was cut off continues from its checkpoint; what ended is not done again. So
   a search that is killed anywhere and started again ends with the same trials.
3. One that diverges is written down with the reason, and the others continue. One over `most_flops`
   is written down and not trained, and does not count towards `trials`.

The work folder has

    data/                   the prepared corpus
    trials/<number>.json    what was drawn, how it ended, the perplexity of each seed
    trials/<number>/        a run of `protot_jax.pretrain`
    search.parquet          a row per trial (`SCHEMA`)
    search.json             all trials, the best, and its settings as flags of `pretrain`
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import math
import os
from pathlib import Path
import shlex
import statistics
from typing import Any

import jax
from ml_collections import ConfigDict
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import DivergedError, UsageError
from lm_jax.run import cli, stop, terminal
from lm_jax.run.config import config_hash, from_plain
from lm_jax.run.files import read_json, replace_file, write_json
from lm_jax.run.workdir import open_workdir
from protot_jax import pretrain
from protot_jax.config import PretrainConfig, with_fields
from protot_jax.saved_run import DATA, validation_perplexity
from protot_jax.search_space import (
    DIVERGED,
    DONE,
    REFUSED,
    RUNNING,
    Record,
    SearchConfig,
    check,
    forward_flops,
    propose,
)
from protot_jax.seeds import over_seeds

REPORT, ROWS, TRIALS = "search.json", "search.parquet", "trials"
SCHEMA = pa.schema(
    {
        "trial": pa.int64(),
        "status": pa.string(),
        "learning_rate": pa.float64(),
        "batch_size": pa.int64(),
        # The other fields, as a JSON object.
        "choices": pa.string(),
        # Forward, of one example.
        "flops": pa.int64(),
        "perplexity": pa.float64(),
        # In the order of the config.
        "seed_perplexities": pa.list_(pa.float64()),
        "reason": pa.string(),
    }
)
_SHOWN = 10

# From the settings and the folder of a trial to the perplexity of each of its seeds.
Measure = Callable[[PretrainConfig, Path], Sequence[float]]


def train(config: PretrainConfig, folder: Path) -> list[float]:
    """Pretrains every seed of a trial and returns their lowest validation perplexities."""
    summary = pretrain.run_in(
        ConfigDict(dataclasses.asdict(config)), folder, data=folder.parent.parent / DATA
    )
    # Every seed compiles programs of its own, which no other calls: gigabytes, over a search.
    jax.clear_caches()
    return [validation_perplexity(result) for result in summary["seeds"]]


def run(config: SearchConfig, folder: Path, measure: Measure = train) -> dict[str, Any]:
    """Runs or resumes a search in an open work folder and returns its report.

    Args:
      config: of the search, which has passed `check`.
      folder: the work folder.
      measure: what a trial is worth.

    Raises:
      UsageError: the folder holds a trial that this search could not have drawn.
      DivergedError: every trial diverged; the report is written.
      StoppedError: a stop was requested.
    """
    (folder / TRIALS).mkdir(exist_ok=True)
    records: list[Record] = []
    while sum(record["status"] != REFUSED for record in records) < config.trials:
        stop.check(f"before trial {len(records)}")
        records.append(_trial(config, folder, records, measure))
    done = [record for record in records if record["status"] == DONE]
    best = min(done, key=lambda record: record["perplexity"], default=None)
    report = {
        "sampler": config.sampler,
        "seeds": list(config.base.seeds),
        "best": best,
        "flags": best and flags(best["drawn"]),
        "trials": records,
    }
    with replace_file(folder / ROWS) as file:
        pq.write_table(pa.Table.from_pylist(list(_rows(records)), SCHEMA), file)
    write_json(folder / REPORT, report)
    if best is None:
        first = next(record for record in records if record["status"] == DIVERGED)
        raise DivergedError(
            f"all {config.trials} trials diverged, trial {first['trial']} with: {first['reason']}; "
            "lower config.learning_rate[1] or set config.base.clip_norm, in another --workdir"
        )
    return report


def _trial(
    config: SearchConfig, folder: Path, before: Sequence[Record], measure: Measure
) -> Record:
    """The record of the trial after those `before`, which is drawn and trained if need be."""
    number = len(before)
    place = folder / TRIALS / f"{number:03}"
    path = place.with_suffix(".json")
    record: Record
    if path.exists():
        record = read_json(path)
        _check_own(config, record, path)
    else:
        drawn = propose(config, before)
        own = with_fields(config.base, drawn)
        cost = forward_flops(own)
        record = {
            "trial": number,
            "status": RUNNING,
            "drawn": drawn,
            "flops": cost,
            "config_hash": config_hash(own),
        }
        if 0 < config.most_flops < cost:
            reason = f"{cost:.3g} FLOPs forward, above config.most_flops = {config.most_flops:.3g}"
            record |= {"status": REFUSED, "reason": reason}
        write_json(path, record)
    if record["status"] == RUNNING:
        print(f"trial {number}: {flags(record['drawn'])}", flush=True)
        record |= _outcome(with_fields(config.base, record["drawn"]), place, measure)
        write_json(path, record)
    return record


def _outcome(own: PretrainConfig, place: Path, measure: Measure) -> Record:
    try:
        perplexities = list(measure(own, place))
    except DivergedError as error:
        # A folder that is moved should not name where it was.
        return {"status": DIVERGED, "reason": str(error).replace(f"{place}{os.sep}", "")}
    mean = statistics.mean(perplexities)
    if not math.isfinite(mean):
        return {"status": DIVERGED, "reason": f"the mean validation perplexity is {mean}"}
    return {"status": DONE, "perplexity": mean, "seed_perplexities": perplexities}


def _check_own(config: SearchConfig, record: Record, path: Path) -> None:
    drawn, values = record["drawn"], config.values()
    low, high = config.learning_rate
    inside = drawn.keys() == {"learning_rate", *values} and low <= drawn["learning_rate"] <= high
    inside = inside and all(drawn[name] in choices for name, choices in values.items())
    if not inside or record["config_hash"] != config_hash(with_fields(config.base, drawn)):
        raise UsageError(
            f"{path} is a trial of another search; continue with its settings, or choose another "
            "--workdir"
        )


def _rows(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        others = dict(record["drawn"])
        own = {name: others.pop(name) for name in ("learning_rate", "batch_size")}
        yield record | own | {"choices": json.dumps(others)}


def flags(drawn: Mapping[str, Any]) -> str:
    """The settings of a trial as flags of `protot_jax.pretrain`."""
    return shlex.join(f"--config.{name}={value}" for name, value in drawn.items())


def format_report(report: Mapping[str, Any]) -> str:
    """The best trials for a terminal."""
    ended = {status: [] for status in (DONE, DIVERGED, REFUSED)}
    for record in report["trials"]:
        ended[record["status"]].append(record)
    ranked = sorted(ended[DONE], key=lambda record: record["perplexity"])
    lines = [
        f"{len(ranked)} trials ended, {len(ended[DIVERGED])} diverged, {len(ended[REFUSED])} were "
        "above the limit of FLOPs",
        "lowest validation perplexity, mean over seeds:",
    ]
    shown = [
        (str(one["trial"]), str(over_seeds(one["seed_perplexities"])), flags(one["drawn"]))
        for one in ranked[:_SHOWN]
    ]
    lines.append(terminal.format_table(("trial", "mean over seeds", "flags"), shown, left=(1, 2)))
    return "\n".join([*lines, f"best: {report['flags']}"])


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, SearchConfig)
    check(config)
    with open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as workdir:
        print(format_report(run(config, workdir.path)))


if __name__ == "__main__":
    cli.app(main, config="protot/search", config_class=SearchConfig, training=True)

"""Trains every variant of an ablation at its learning rates and seeds, and tabulates them.

    iaj protot study --config=protot/kernel_size --workdir=runs/kernel_size
    iaj protot study --config=protot/kernel_size --workdir=runs/kernel_size --only=taps_4,taps_5

Prototype Transformer, appendix A.7: a variant is trained at each learning rate and reported at the
best one, by the mean over seeds of the lowest validation perplexity; the test perplexity is of the
same weights. The interval of a mean is over seeds and ignores that the rate was chosen on the same
text. A run that diverges is recorded with the reason, its rate is worse than all others, and the
study continues. `--only` trains some of the variants now; the table has all that are trained. The
work folder has

    data/                        the prepared corpora, one for each corpus config
    <variant>/lr_<rate>/         a run of `iaj protot pretrain`; with divergence.json if it
                                 diverged
    study.parquet                a row per run and seed (`SCHEMA`)
    study.json                   the table (`results.StudySummary`)

The same command resumes a killed study; runs that finished or diverged are not trained again. With
more seeds and `--resume=force` a finished study trains those that it lacks. A stored run of other
settings than the study's is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import statistics
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.console import cli, terminal
from lm_jax.errors import DivergedError, UsageError, nearest
from lm_jax.run.config import config_hash, from_plain
from lm_jax.run.files import write_json
from lm_jax.run.finished import is_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import CommandOptions
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import Resume, config_changes, list_changes, open_workdir
from lm_jax.study.frame import SUMMARY
from lm_jax.text.splits import SPLITS as TEXT_SPLITS
from lm_jax.train.config import MAY_CHANGE
from lm_jax.train.metrics import EVALUATIONS, METRICS
from protot_jax.studies.pretraining.run import run_in
from protot_jax.training import diverged
from protot_jax.training.config import PretrainConfig
from protot_jax.training.diverged import DIVERGED
from protot_jax.training.results import (
    DivergedRun,
    FirstRouting,
    PerplexityBySplit,
    PretrainSummary,
    StudyRow,
    StudySummary,
)
from protot_jax.training.saved_run import seed_folder
from protot_jax.training.seeds import over_seeds
from protot_jax.training.study_config import SPLITS, StudyConfig, each_run

TABLE, ROWS = "study.json", "study.parquet"
_ROUTING = ("alpha", "write_gini", "write_top_1")


@dataclasses.dataclass(frozen=True)
class SeedRow:
    """One seed of one run.

    Attributes:
      train_documents, validation_documents, test_documents: number of documents used.
      validation_perplexity, test_perplexity: those of the weights of lowest validation perplexity,
        which `best_step` updates made.
      last_validation_perplexity, last_test_perplexity: those of the last weights.
      steps_per_second: rate of training alone, without evaluations.
      alpha, write_gini, write_top_1: numbers of the first layer of the weights of `best_step`; null
        for a model without prototypes.
    """

    variant: str
    learning_rate: float
    seed: int
    steps: int
    tokens_seen: int
    train_documents: int
    validation_documents: int
    test_documents: int
    best_step: int
    validation_perplexity: float
    test_perplexity: float
    last_validation_perplexity: float
    last_test_perplexity: float
    steps_per_second: float
    alpha: float | None = None
    write_gini: float | None = None
    write_top_1: float | None = None


_COLUMNS: Mapping[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    float | None: pa.float64(),
}
SCHEMA = pa.schema({field.name: _COLUMNS[field.type] for field in dataclasses.fields(SeedRow)})


@dataclasses.dataclass(frozen=True)
class Options(CommandOptions):
    """The part of the study to train now.

    Attributes:
      only: names of the variants to train now; default all.
    """

    only: tuple[str, ...] = ()


def run(
    config: StudyConfig,
    folder: Path,
    only: Sequence[str] | None = None,
    *,
    resume: Resume = "auto",
) -> StudySummary:
    """Trains the variants in an open work folder and returns the table.

    Args:
      config: settings of the study.
      folder: the work folder.
      only: names of the variants to train now; None trains all.
      resume: rule of resuming the run of each variant and rate (`open_workdir`). "force" also
        resumes those of other settings, as with more seeds; what is trained already is kept.

    Raises:
      UsageError: a name in `only` is no variant, or a run is of other settings.
    """
    names = [variant.name for variant in config.variants]
    for name in only or ():
        if name not in names:
            raise UsageError(f"--only: there is no variant {name!r}{nearest(name, names)}")
    for variant in config.variants:
        if only and variant.name not in only:
            for place, settled in each_run(config, variant):
                _check_stored(settled, folder / place)
    for variant in config.variants:
        if not only or variant.name in only:
            for place, settled in each_run(config, variant):
                data = folder / "data" / config_hash(settled.corpus)[:12]
                _train(variant.name, settled, folder / place, data, resume)
    rows, lost = _stored(config, folder)
    record_provenance(folder, collect_provenance())
    table = [dataclasses.asdict(row) for row in rows]
    write_table(folder / ROWS, pa.Table.from_pylist(table, SCHEMA))
    best = best_of_variants(config, rows, lost)
    summary = StudySummary(config.table, config.paper_split, best, tuple(lost))
    write_json(folder / TABLE, summary)
    return summary


def _train(variant: str, settled: PretrainConfig, folder: Path, data: Path, resume: Resume) -> None:
    """Trains or resumes a run, unless it is known to diverge."""
    marker, own = folder / DIVERGED, dataclasses.asdict(settled)
    if marker.is_file() and not config_changes(folder, own, MAY_CHANGE):
        return
    if is_finished(folder) and not config_changes(folder, own, MAY_CHANGE):
        # By force it would be evaluated again.
        resume = "auto"
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_in(settled, folder, resume=resume, data=data)
    except DivergedError as error:
        reason = diverged.reason(error, folder)
        write_json(marker, DivergedRun(variant, settled.learning_rate, reason))
        print(f"{variant} diverged at a rate of {settled.learning_rate:g}: {reason}", flush=True)
    else:
        marker.unlink(missing_ok=True)


def _check_stored(settled: PretrainConfig, folder: Path) -> None:
    """Refuses a run that this study would not have trained; it may have other seeds."""
    if not is_finished(folder) and not (folder / DIVERGED).is_file():
        return
    if changes := config_changes(folder, settled, (*MAY_CHANGE, "seeds")):
        raise UsageError(
            f"{folder} holds a run with {list_changes(changes)}; put that back, remove the folder, "
            "or choose another --workdir"
        )


def _stored(config: StudyConfig, folder: Path) -> tuple[list[SeedRow], list[DivergedRun]]:
    """The runs that finished, by seed, and those that diverged."""
    rows: list[SeedRow] = []
    lost: list[DivergedRun] = []
    for variant in config.variants:
        for place, settled in each_run(config, variant):
            if is_finished(folder / place):
                own = list(_rows(variant.name, settled, folder / place))
                rows += own
                mean = statistics.mean(row.validation_perplexity for row in own) if own else 0.0
                if not math.isfinite(mean):
                    reason = f"the mean validation perplexity is {mean}"
                    lost.append(DivergedRun(variant.name, settled.learning_rate, reason))
            elif (marker := folder / place / DIVERGED).is_file():
                lost.append(load_result(marker, DivergedRun))
    return rows, lost


def _rows(variant: str, settled: PretrainConfig, folder: Path) -> Iterator[SeedRow]:
    summary = load_result(folder / SUMMARY, PretrainSummary)
    used = summary.corpus.documents_used
    for each in summary.seeds:
        if each.seed not in settled.seeds:
            continue
        metrics = pq.read_table(seed_folder(folder, each.seed) / METRICS)
        yield SeedRow(
            variant=variant,
            learning_rate=settled.learning_rate,
            seed=each.seed,
            steps=each.steps,
            tokens_seen=each.tokens_seen,
            train_documents=used["train"],
            validation_documents=used["validation"],
            test_documents=used["test"],
            best_step=each.best.step,
            validation_perplexity=each.best.validation_perplexity,
            test_perplexity=each.best.test_perplexity,
            last_validation_perplexity=each.last.validation_perplexity,
            last_test_perplexity=each.last.test_perplexity,
            # The median, since the first steps compile and others may pause.
            steps_per_second=1.0 / statistics.median(metrics["seconds"].to_numpy()),
            **_first_routing(seed_folder(folder, each.seed), each.best.step),
        )


def _first_routing(folder: Path, step: int) -> dict[str, float]:
    """The first layer's routing at an evaluation; nothing for a model without prototypes."""
    named = {f"layer_0/{name}": name for name in _ROUTING}
    rows = pq.read_table(
        folder / EVALUATIONS, filters=[("step", "=", step), ("name", "in", list(named))]
    ).to_pylist()
    return {named[row["name"]]: row["value"] for row in rows}


def best_of_variants(
    config: StudyConfig, rows: Sequence[SeedRow], lost: Sequence[DivergedRun] = ()
) -> tuple[StudyRow, ...]:
    """A row per trained variant, at the learning rate of lowest mean perplexity over its seeds.

    A rate whose run is among the `lost` is worse than all others.
    """
    table: list[StudyRow] = []
    for variant in config.variants:
        by_rate: dict[float, list[SeedRow]] = {}
        bad = {run.learning_rate for run in lost if run.variant == variant.name}
        for row in rows:
            if row.variant == variant.name and row.learning_rate not in bad:
                by_rate.setdefault(row.learning_rate, []).append(row)
        if not by_rate:
            continue
        means = {
            rate: statistics.mean(row.validation_perplexity for row in seeds)
            for rate, seeds in by_rate.items()
        }
        rate = min(means, key=means.__getitem__)
        best = by_rate[rate]
        table.append(
            StudyRow(
                variant=variant.name,
                changes=variant.changes,
                learning_rate=rate,
                rates_tried=len(means) + len(bad),
                perplexity=PerplexityBySplit(
                    validation=over_seeds([row.validation_perplexity for row in best]),
                    test=over_seeds([row.test_perplexity for row in best]),
                ),
                tokens_seen=best[0].tokens_seen,
                steps_per_second=statistics.mean(row.steps_per_second for row in best),
                paper=variant.paper,
                first_routing=_routing_over_seeds(best),
                documents={name: getattr(best[0], f"{name}_documents") for name in TEXT_SPLITS},
            )
        )
    return tuple(table)


def _routing_over_seeds(rows: Sequence[SeedRow]) -> FirstRouting | None:
    alpha, gini, top_1 = (
        [value for row in rows if (value := getattr(row, name)) is not None] for name in _ROUTING
    )
    if not alpha:
        return None
    return FirstRouting(over_seeds(alpha), over_seeds(gini), over_seeds(top_1))


def format_table(summary: StudySummary) -> str:
    """The table for a terminal, the paper's number in the line of its split."""
    rows = []
    for row in summary.rows:
        paper = "" if row.paper is None else f"{row.paper:.1f}"
        of_split = {split: paper if split == summary.paper_split else "" for split in SPLITS}
        speed = f"{row.steps_per_second:.2f}"
        validation, test = str(row.perplexity.validation), str(row.perplexity.test)
        rows += [
            (
                *(row.variant, "validation", validation, f"{row.learning_rate:.2g}", speed),
                of_split["validation"],
            ),
            ("", "test", test, "", "", of_split["test"]),
        ]
    known = {row.variant for row in summary.rows}
    for variant in dict.fromkeys(one.variant for one in summary.diverged):
        if variant not in known:
            rows.append((variant, "", "diverged at every rate", "", "", ""))
    columns = ("variant", "text", "mean over seeds", "rate", "steps/s", "paper")
    lines = [
        f"{summary.table}: perplexity of the weights of lowest validation perplexity",
        terminal.format_table(columns, rows, left=(0, 1, 2)),
        "The paper's numbers are of FineWeb-Edu and 16,000 tokens.",
        *_documents(summary.rows),
        *(
            f"{one.variant} diverged at a rate of {one.learning_rate:.2g}: {one.reason}"
            for one in summary.diverged
        ),
    ]
    routing = [
        (row.variant, *(f"{one.mean:.3f}" for one in (own.alpha, own.gini, own.top_1)))
        for row in summary.rows
        if (own := row.first_routing)
    ]
    if routing:
        heads = ("write gates of layer 0", "alpha", "Gini", "top-1")
        lines += ["", terminal.format_table(heads, routing, left=(0,))]
    return "\n".join(lines)


def _documents(rows: Sequence[StudyRow]) -> list[str]:
    """How many documents were used; variants are named where they differ."""
    used: dict[str, list[str]] = {}
    for row in rows:
        counts = ", ".join(f"{name} {count:,}" for name, count in row.documents.items())
        used.setdefault(counts, []).append(row.variant)
    shown = {counts: ", ".join(names) for counts, names in used.items() if counts}
    one = len(shown) == 1
    return [
        f"Documents used{'' if one else f' by {names}'}: {counts}"
        for counts, names in shown.items()
    ]


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, StudyConfig)
    with open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as workdir:
        # A new folder has new runs.
        resume: Resume = "force" if arguments.resume == "force" else "auto"
        summary = run(config, workdir.path, arguments.options.only, resume=resume)
        print(format_table(summary))
        if not summary.rows:
            names = ", ".join(dict.fromkeys(one.variant for one in summary.diverged))
            raise DivergedError(
                f"all runs so far diverged ({names}); lower the learning_rates of the variants or "
                "set config.base.clip_norm, in another --workdir"
            )


if __name__ == "__main__":
    cli.app(
        main, config="protot/kernel_size", config_class=StudyConfig, options=Options, training=True
    )

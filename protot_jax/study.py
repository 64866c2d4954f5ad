"""Trains every variant of an ablation, each at its learning rates and seeds, into one table.

    iaj protot study --config=protot/kernel_size --workdir=runs/kernel_size
    iaj protot study --config=protot/kernel_size --workdir=runs/kernel_size --only=taps_4,taps_5

Prototype Transformer, appendix A.7: a variant is trained at each learning rate and counted at its
best, by the mean over seeds of the lowest validation perplexity; the test perplexity is of the same
weights. The interval of a mean is over seeds and leaves out that the rate was chosen on the same
text. `--only` trains some of the variants now; the table holds those that are trained. The
work folder has

    data/                        the prepared corpora, one for each way to cut them
    <variant>/lr_<rate>/         a run of `protot_jax.pretrain`
    study.parquet                a row per run and seed (`SCHEMA`)
    study.json                   the table, with what each row rests on

A killed study is started again with the same command; what is trained is not trained again.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from pathlib import Path
import statistics
from typing import Any

from ml_collections import ConfigDict
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import UsageError, nearest
from lm_jax.run import cli, terminal
from lm_jax.run.config import config_hash, from_plain
from lm_jax.run.files import read_json, replace_file, write_json
from lm_jax.run.options import option
from lm_jax.run.workdir import finish_time, open_workdir
from lm_jax.train.metrics import METRICS
from protot_jax import pretrain
from protot_jax.saved_run import seed_folder
from protot_jax.seeds import OverSeeds, over_seeds
from protot_jax.study_config import SPLITS, StudyConfig, each_run

TABLE, ROWS = "study.json", "study.parquet"
SCHEMA = pa.schema(
    {
        "variant": pa.string(),
        "learning_rate": pa.float64(),
        "seed": pa.int64(),
        "steps": pa.int64(),
        "tokens_seen": pa.int64(),
        # Of the weights of lowest validation perplexity, after so many steps, and of the last ones.
        "best_step": pa.int64(),
        "validation_perplexity": pa.float64(),
        "test_perplexity": pa.float64(),
        "last_validation_perplexity": pa.float64(),
        "last_test_perplexity": pa.float64(),
        # Training alone, without evaluations.
        "steps_per_second": pa.float64(),
    }
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What of the study is done now."""

    only: tuple[str, ...] = option((), "names of the variants to train now; default all")


def run(config: StudyConfig, folder: Path, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains the variants in an open work folder and returns the table.

    Raises:
      UsageError: a name in `only` is no variant.
    """
    names = [variant.name for variant in config.variants]
    for name in only or ():
        if name not in names:
            raise UsageError(f"--only: there is no variant {name!r}{nearest(name, names)}")
    for variant in config.variants:
        if only and variant.name not in only:
            continue
        for place, settled in each_run(config, variant):
            digest = config_hash(settled.corpus)[:12]
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            pretrain.run_in(
                ConfigDict(dataclasses.asdict(settled)),
                folder / place,
                data=folder / "data" / digest,
            )
    rows = list(_rows(config, folder))
    with replace_file(folder / ROWS) as file:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file)
    table = {
        "table": config.table,
        "paper_split": config.paper_split,
        "rows": tabled(config, rows),
    }
    write_json(folder / TABLE, table)
    return table


def _rows(config: StudyConfig, folder: Path) -> Iterator[dict[str, Any]]:
    for variant in config.variants:
        for place, settled in each_run(config, variant):
            if not finish_time(folder / place):
                continue
            summary = read_json(folder / place / pretrain.SUMMARY)
            for result in summary["seeds"]:
                metrics = pq.read_table(seed_folder(folder / place, result["seed"]) / METRICS)
                seconds = metrics["seconds"].to_numpy()
                own = {name: result[name] for name in SCHEMA.names if name in result}
                for split in SPLITS:
                    name = f"{split}_perplexity"
                    # JSON has no infinity, which is written as a word.
                    own[name] = float(result["best"][name])
                    own[f"last_{name}"] = float(result["last"][name])
                yield own | {
                    "variant": variant.name,
                    "learning_rate": settled.learning_rate,
                    "best_step": result["best"]["step"],
                    # The first steps compile, and the median is of no single pause.
                    "steps_per_second": 1.0 / statistics.median(seconds),
                }


def tabled(config: StudyConfig, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per trained variant, at the learning rate of lowest mean perplexity over its seeds."""
    table = []
    for variant in config.variants:
        own = [row for row in rows if row["variant"] == variant.name]
        by_rate: dict[float, list[Mapping[str, Any]]] = {}
        for row in own:
            by_rate.setdefault(row["learning_rate"], []).append(row)
        if not by_rate:
            continue
        means = {
            rate: statistics.mean(row["validation_perplexity"] for row in result)
            for rate, result in by_rate.items()
        }
        rate = min(means, key=means.__getitem__)
        best = by_rate[rate]
        perplexities = {
            split: dataclasses.asdict(over_seeds([row[f"{split}_perplexity"] for row in best]))
            for split in SPLITS
        }
        table.append(
            {
                "variant": variant.name,
                "changes": list(variant.changes),
                "learning_rate": rate,
                "rates_tried": len(means),
                "perplexity": perplexities,
                "tokens_seen": best[0]["tokens_seen"],
                "steps_per_second": statistics.mean(row["steps_per_second"] for row in best),
                "paper": variant.paper,
            }
        )
    return table


def format_table(table: Mapping[str, Any]) -> str:
    """The table for a terminal, the paper's number in the line of the text that it is of."""
    rows = []
    for row in table["rows"]:
        for split, values in row["perplexity"].items():
            own = row["paper"] if split == table["paper_split"] else None
            paper = "" if own is None else f"{own:.1f}"
            name, rate, speed = "", "", ""
            if split == SPLITS[0]:
                name, rate = row["variant"], f"{row['learning_rate']:.2g}"
                speed = f"{row['steps_per_second']:.2f}"
            rows.append((name, split, str(OverSeeds(**values)), rate, speed, paper))
    columns = ("variant", "text", "mean over seeds", "rate", "steps/s", "paper")
    return "\n".join(
        [
            f"{table['table']}: perplexity of the weights of lowest validation perplexity",
            terminal.format_table(columns, rows, left=(0, 1, 2)),
            "The paper's numbers are of FineWeb-Edu and 16,000 tokens.",
        ]
    )


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, StudyConfig)
    with open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as workdir:
        print(format_table(run(config, workdir.path, arguments.options.only)))


if __name__ == "__main__":
    cli.app(
        main, config="protot/kernel_size", config_class=StudyConfig, options=Options, training=True
    )

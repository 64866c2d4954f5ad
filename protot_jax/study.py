"""Trains every variant of an ablation, each at its learning rates and seeds, into one table.

    python -m protot_jax.study --config=configs/protot/kernel_size.py --workdir=runs/kernel_size

Prototype Transformer, appendix A.7: a variant is trained at each learning rate and counted at its
best, by the mean over seeds of the lowest validation perplexity; the test perplexity is of the same
weights. The interval of a mean is over seeds and leaves out that the rate was chosen on the same
text. `--only=k4,k5` trains some of the variants now; the table holds those that are trained. The
work folder has

    data/                        the prepared corpora, one for each way to cut them
    <variant>/lr_<rate>/         a run of `protot_jax.pretrain`
    study.parquet                a row per run and seed (`SCHEMA`)
    study.json                   the table, with what each row rests on

A killed study is started again with the same command; what is trained is not trained again.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
from pathlib import Path
import statistics
from typing import Any, Literal, get_args

from absl import flags
from ml_collections import ConfigDict
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax import launch, runs, settings
from lm_jax.config_files import in_mode
from lm_jax.errors import UsageError, nearest
from lm_jax.train.metrics import METRICS
from protot_jax import pretrain
from protot_jax.config import PretrainConfig, smoke, with_fields
from protot_jax.seeds import OverSeeds, over_seeds
from protot_jax.trained import seed_folder

Split = Literal["validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_ONLY = flags.DEFINE_list("only", None, "variants to train now, by name; all by default")
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
class Variant:
    """One row of a table.

    Attributes:
      name: of its folder.
      changes: what differs from the study's `base`, as `field=value`; a value is JSON, or a word.
      learning_rates: to choose from; none stands for that of `base` or of `changes`.
      paper: what the paper's table says, if it is in one.
    """

    name: str
    changes: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    paper: float | None = None


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """An ablation.

    Attributes:
      base: what all variants share.
      variants: the rows.
      table: of the paper.
      paper_split: the text that the paper's perplexities are of.
      smoke: makes every variant so small, after its changes, that it takes seconds.
    """

    base: PretrainConfig
    variants: tuple[Variant, ...]
    table: str = ""
    paper_split: Split = "validation"
    smoke: bool = False

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"config.variants are named {names}; give each a name of its own")
        for variant in self.variants:
            changed(self.base, variant)


def study(
    mode: str,
    *variants: Variant,
    table: str,
    paper_split: Split = "validation",
    **shared: Any,
) -> ConfigDict:
    """The `get_config(mode)` of an ablation; `shared` are fields of `PretrainConfig`.

    Raises:
      UsageError: for an unknown mode, or a variant that changes what is not there.
    """
    config = StudyConfig(PretrainConfig(**shared), variants, table, paper_split)
    return in_mode(mode, config, {"smoke": _smoke}, of="a study")


def _smoke(config: StudyConfig) -> StudyConfig:
    # One row at one rate shows that it works; the first is often the default.
    last = config.variants[-1]
    last = dataclasses.replace(last, learning_rates=last.learning_rates[:1])
    return dataclasses.replace(config, variants=(last,), smoke=True)


def changed(base: PretrainConfig, variant: Variant) -> PretrainConfig:
    """The settings of a variant.

    Raises:
      UsageError: naming the variant, for a change without value, of no field or of another type.
    """
    where = f"variant {variant.name}"
    changes = {}
    for change in variant.changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"{where}: {change!r} has no value; write field=value")
        changes[name] = _value(text)
    try:
        return with_fields(base, changes)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _value(text: str) -> Any:
    # A word needs no quotes, as on a command line.
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def each_run(config: StudyConfig, variant: Variant) -> Iterator[tuple[str, PretrainConfig]]:
    """The folder and the settings of every run of a variant."""
    own = changed(config.base, variant)
    own = smoke(own) if config.smoke else own
    for rate in variant.learning_rates or (own.learning_rate,):
        yield f"{variant.name}/lr_{rate:g}", dataclasses.replace(own, learning_rate=rate)


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
            digest = settings.config_hash(settled.corpus)[:12]
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            pretrain.run_in(
                ConfigDict(dataclasses.asdict(settled)),
                folder / place,
                data=folder / "data" / digest,
            )
    rows = list(_rows(config, folder))
    with runs.replace_file(folder / ROWS) as file:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file)
    table = {
        "table": config.table,
        "paper_split": config.paper_split,
        "rows": tabled(config, rows),
    }
    runs.write_json(folder / TABLE, table)
    return table


def _rows(config: StudyConfig, folder: Path) -> Iterator[dict[str, Any]]:
    for variant in config.variants:
        for place, settled in each_run(config, variant):
            if not runs.finished(folder / place):
                continue
            summary = runs.read_json(folder / place / pretrain.SUMMARY)
            for found in summary["seeds"]:
                metrics = pq.read_table(seed_folder(folder / place, found["seed"]) / METRICS)
                seconds = metrics["seconds"].to_numpy()
                own = {name: found[name] for name in SCHEMA.names if name in found}
                for split in SPLITS:
                    name = f"{split}_perplexity"
                    # JSON has no infinity, which is written as a word.
                    own[name] = float(found["best"][name])
                    own[f"last_{name}"] = float(found["last"][name])
                yield own | {
                    "variant": variant.name,
                    "learning_rate": settled.learning_rate,
                    "best_step": found["best"]["step"],
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
            rate: statistics.mean(row["validation_perplexity"] for row in found)
            for rate, found in by_rate.items()
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


def told(table: Mapping[str, Any]) -> str:
    """The table for a terminal, the paper's number in the line of the text that it is of."""
    lines = [
        f"{table['table']}: perplexity of the weights of lowest validation perplexity",
        f"{'variant':24} {'text':10} {'mean over seeds':58} {'rate':>9} {'steps/s':>8}   paper",
    ]
    for row in table["rows"]:
        for split, values in row["perplexity"].items():
            own = row["paper"] if split == table["paper_split"] else None
            paper = "" if own is None else f"{own:.1f}"
            name, rate, speed = "", "", ""
            if split == SPLITS[0]:
                name, rate = row["variant"], f"{row['learning_rate']:.2g}"
                speed = f"{row['steps_per_second']:.2f}"
            lines.append(
                f"{name:24} {split:10} {OverSeeds(**values)!s:58} {rate:>9} {speed:>8} "
                f"{paper:>7}".rstrip()
            )
    return "\n".join([*lines, "The paper's numbers are of FineWeb-Edu and 16,000 tokens."])


def main(arguments: launch.Arguments) -> None:
    """The command."""
    config = launch.freeze(arguments.config, StudyConfig)
    with runs.open_workdir(arguments.folder, arguments.config, resume=arguments.resume) as workdir:
        print(told(run(config, workdir.path, _ONLY.value)))


if __name__ == "__main__":
    launch.app(main, config="configs/protot/kernel_size.py", training=True)

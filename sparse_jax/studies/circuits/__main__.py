"""Finds circuits of dense and sparse models: heads and token edges that explain a task.

    iaj sparse circuits --dense=smollm2 --task=ioi
    iaj sparse circuits --dense=path/to/folder --task=mine.jsonl
    iaj sparse circuits --pair=runs/pair --task=copy,docstring
    iaj sparse circuits --dense=smollm2 --control=runs/sparse/seed_234/control/model \\
        --sparse="$(echo runs/sparse/seed_234/target_*/model)" --task=ioi,copy \\
        --workdir=runs/circuits --config.ablations="('counterfactual','zero')"

After section 4.2 of "Sparse Attention Post-Training". Only --dense is required. A task is a name
(copy, ioi, ioi_long, greater_than, docstring and others) or a .jsonl file with one object per line:

    {"clean": "...", "corrupt": "...", "answers": [" yes"], "wrong_answers": [" no"]}

Both prompts must have as many tokens, and every continuation, written with its leading space, must
be one token. `study.py` lists the files of the work folder. A line of progress names each part
that is measured; the same command resumes a stopped or killed study after the last part that was
stored, and ends with the same numbers.
"""

import dataclasses
from pathlib import Path
import textwrap
from typing import cast

from ml_collections import ConfigDict

from lm_jax.assets import published
from lm_jax.report import slug
from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.results import load_result
from lm_jax.run.settings import CommandOptions
from lm_jax.run.workdir import open_workdir
from sparse_jax.studies.circuits import report_text, study
from sparse_jax.studies.circuits.config import CircuitConfig, task_name
from sparse_jax.studies.circuits.results import CircuitSummary
from sparse_jax.studies.pair.folders import model_folders, text_files

_WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The models and the tasks; each sets the field of the config of that name.

    `pair` sets all three models, and leaves out the prompts of their training text.

    Attributes:
      pair: work folder of iaj sparse pair, or pair_192, whose three models are taken.
      dense: model whose circuits are found: a folder, a .gguf file, or a name of the manifest.
      control: model of the same training with every gate open.
      sparse: exported folder of iaj sparse posttrain.
      task: names of tasks, or .jsonl files, with commas between.
    """

    pair: str | None = None
    dense: str | None = None
    control: str | None = None
    sparse: str | None = None
    task: tuple[str, ...] = ()


def settings(arguments: cli.Arguments) -> CircuitConfig:
    """The config with the options in it."""
    config = cast(ConfigDict, arguments.config).copy_and_resolve_references()
    options = arguments.options
    if options.pair is not None:
        pair = published.resolve(options.pair)
        for role, folder in model_folders(pair).items():
            config[role] = str(folder)
        config.trained_on = tuple(map(str, text_files(pair)))
    for role in ("dense", "control", "sparse"):
        if (source := getattr(options, role)) is not None:
            config[role] = source
    if options.task:
        config.tasks = options.task
    return from_plain(config, CircuitConfig)


def default_folder(config: CircuitConfig) -> Path:
    """The work folder of a command that names none."""
    about = [Path(source).name for source in config.models.values()]
    return Path("runs", "circuits", slug(" ".join([*about, *map(task_name, config.tasks)])))


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = settings(arguments)
    folder = arguments.workdir or default_folder(config)
    with open_workdir(folder, config, resume=arguments.resume) as work:
        given = study.inputs(config)
        done = finish_time(work.path, given)
        if not done:
            study.run(config, work.path)
            mark_finished(work.path, given)
        summary = load_result(work.path / study.SUMMARY, CircuitSummary)
        lines = [
            line
            for finding in [*report_text.left_out(summary), *report_text.findings(summary)]
            for line in textwrap.wrap(finding, _WIDTH, subsequent_indent="  ")
        ]
        print(*[f"finished {done}"] * bool(done), *lines, sep="\n")
        print(f"report: {work.path / study.REPORT}")


if __name__ == "__main__":
    cli.app(
        main,
        config="sparse/circuits",
        config_class=CircuitConfig,
        options=Options,
        workdir_required=False,
    )

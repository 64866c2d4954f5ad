"""Trains a dense model, and from it a sparse one and a control, all on the same kind of text.

    iaj sparse pair --config=sparse/pair --workdir=runs/pair
    iaj sparse pair --config=sparse/pair:quickstart --workdir=runs/pair_quickstart

`study.py` lists the files of the work folder. The same command resumes a killed run, which ends
with the same parameters.
"""

from lm_jax.run import cli, processes
from lm_jax.run.config import from_plain
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.results import load_result
from lm_jax.text.corpora import corpus_inputs
from lm_jax.train.config import MAY_CHANGE
from sparse_jax.studies.pair import study
from sparse_jax.studies.pair.config import PairConfig
from sparse_jax.studies.pair.report_text import format_summary
from sparse_jax.studies.pair.results import PairSummary


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, PairConfig)
    force = arguments.resume == "force"
    opened = processes.open_shared_workdir(
        arguments.folder, arguments.config, resume=arguments.resume, may_change=MAY_CHANGE
    )
    with opened as folder:
        given = corpus_inputs({"config.text": config.text.source})
        done = None if force else finish_time(folder, given)
        if not done:
            study.run(config, folder, force=force)
            processes.on_first(lambda: mark_finished(folder, given))
        summary = load_result(folder / study.SUMMARY, PairSummary)
    if processes.is_first():
        print(*[f"finished {done}"] * bool(done), format_summary(summary), sep="\n")


if __name__ == "__main__":
    cli.app(main, config="sparse/pair", config_class=PairConfig, distributed=True, training=True)

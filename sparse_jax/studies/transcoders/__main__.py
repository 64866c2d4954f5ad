"""Trains a cross-layer transcoder of a dense or sparse model.

    iaj sparse transcoder --config=sparse/clt --config.model=runs/pair/dense/model \
        --workdir=runs/clt
    iaj sparse transcoder --config=sparse/clt --config.model=smollm2 --config.window=1 \
        --workdir=runs/per_layer

`train.py` lists the files of the work folder. The same command resumes a killed run, which ends
with the same parameters.
"""

from lm_jax.run import cli, processes
from lm_jax.run.config import from_plain
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.results import load_result
from lm_jax.train.config import MAY_CHANGE
from sparse_jax.studies.transcoders import train
from sparse_jax.studies.transcoders.config import TranscoderTraining
from sparse_jax.studies.transcoders.report_text import format_summary
from sparse_jax.studies.transcoders.results import TranscoderSummary


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, TranscoderTraining)
    opened = processes.open_shared_workdir(
        arguments.folder, arguments.config, resume=arguments.resume, may_change=MAY_CHANGE
    )
    with opened as folder:
        given = train.inputs(config)
        done = finish_time(folder, given)
        if not done:
            train.run(config, folder)
            processes.on_first(lambda: mark_finished(folder, given))
        summary = load_result(folder / train.SUMMARY, TranscoderSummary)
    if processes.is_first():
        print(*[f"finished {done}"] * bool(done), format_summary(summary), sep="\n")


if __name__ == "__main__":
    cli.app(
        main, config="sparse/clt", config_class=TranscoderTraining, distributed=True, training=True
    )

"""Trains a dense and a sparse model to add, draws their attention graphs, and measures them.

    iaj sparse addition --config=sparse/addition --workdir=runs/addition
    iaj sparse addition --config=sparse/addition:smoke --workdir=runs/addition_smoke

After Appendix A of "Sparse Attention Post-Training". `study.py` lists the files of the work folder.
The same command resumes a killed study, which ends with the same numbers.
"""

from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.finished import NO_INPUTS, finish_time, mark_finished
from lm_jax.run.results import load_result
from lm_jax.run.workdir import open_workdir
from lm_jax.train.config import MAY_CHANGE
from sparse_jax.studies.addition import report, study
from sparse_jax.studies.addition.config import AdditionConfig
from sparse_jax.studies.addition.results import AdditionSummary


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, AdditionConfig)
    force = arguments.resume == "force"
    opened = open_workdir(
        arguments.folder, arguments.config, resume=arguments.resume, may_change=MAY_CHANGE
    )
    with opened as work:
        done = finish_time(work.path, NO_INPUTS)
        if not done:
            study.run(config, work.path, force=force)
            mark_finished(work.path, NO_INPUTS)
        summary = load_result(work.path / study.SUMMARY, AdditionSummary)
        print(*[f"finished {done}"] * bool(done), *report.findings(summary), sep="\n")
        print(f"report: {work.path / study.REPORT}")


if __name__ == "__main__":
    cli.app(main, config="sparse/addition", config_class=AdditionConfig, training=True)

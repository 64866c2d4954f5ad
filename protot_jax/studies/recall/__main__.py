"""Trains mixers of equal memory to recall, and measures them by length and number of pairs.

    iaj protot recall --config=protot/recall:quickstart --workdir=runs/recall_quickstart
    iaj protot recall --config=protot/recall --workdir=runs/recall

MQAR, induction and a needle in noise; the Prototype Transformer's paper reports none. `study.py`
lists the files of the work folder. The same command resumes a suite that was killed, which ends
with the same numbers.
"""

from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.finished import NO_INPUTS, finish_time, mark_finished
from lm_jax.run.results import load_result
from lm_jax.run.workdir import open_workdir
from protot_jax.studies.recall import report, study
from protot_jax.studies.recall.config import RecallConfig
from protot_jax.studies.recall.results import RecallSummary


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, RecallConfig)
    opened = open_workdir(arguments.folder, arguments.config, resume=arguments.resume)
    with opened as work:
        done = finish_time(work.path, NO_INPUTS)
        if not done:
            study.run(config, work.path)
            mark_finished(work.path, NO_INPUTS)
        result = load_result(work.path / study.SUMMARY, RecallSummary)
        print(*[f"finished {done}"] * bool(done), report.format_tables(result), sep="\n")
        print(f"report: {work.path / study.REPORT}")


if __name__ == "__main__":
    cli.app(main, config="protot/recall", config_class=RecallConfig, training=True)

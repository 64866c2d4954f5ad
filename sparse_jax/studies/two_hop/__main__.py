"""Measures whether transcoders merge two hops of a Boolean computation into one.

    iaj sparse two_hop --config=sparse/two_hop --workdir=runs/two_hop
    iaj sparse two_hop --config=sparse/two_hop:smoke --workdir=runs/two_hop_smoke

Cross-layer transcoders can write the result of a second hop from features of the first layer;
`measures.py` defines how much they do.
"""

from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.finished import NO_INPUTS, finish_time, mark_finished
from lm_jax.run.results import load_result
from lm_jax.run.workdir import open_workdir
from sparse_jax.studies.two_hop import report, study
from sparse_jax.studies.two_hop.config import TwoHopConfig
from sparse_jax.studies.two_hop.results import TwoHopSummary


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, TwoHopConfig)
    opened = open_workdir(arguments.folder, arguments.config, resume=arguments.resume)
    with opened as work:
        done = finish_time(work.path, NO_INPUTS)
        if not done:
            study.run(config, work.path)
            mark_finished(work.path, NO_INPUTS)
        summary = load_result(work.path / study.SUMMARY, TwoHopSummary)
        print(*[f"finished {done}"] * bool(done), *report.findings(summary.runs), sep="\n")
        print(f"report: {work.path / study.REPORT}")


if __name__ == "__main__":
    cli.app(main, config="sparse/two_hop", config_class=TwoHopConfig)

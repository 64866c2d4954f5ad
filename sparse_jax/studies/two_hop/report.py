"""The report of the two-hop study; every number comes from its runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lm_jax import report
from lm_jax.report import Column, Report, Section, Series, section, table_of
from lm_jax.report.prose import Prose
from sparse_jax.studies.two_hop.results import TwoHopRun, TwoHopSummary
from sparse_jax.studies.two_hop.settings import TwoHopConfig

_PROSE = Prose("sparse_jax.studies.two_hop")
KINDS = {0: "cross-layer", 1: "per-layer"}
# Below this share of variance a transcoder has the results; a path of what it lacks says little.
EXPLAINED = 0.1


def build(config: TwoHopConfig, summary: TwoHopSummary, folder: Path) -> Report:
    """The report of a summary."""
    del folder
    runs = summary.runs
    return Report(
        "Two hops or one",
        lambda: [paths(config, runs, second_hop) for second_hop in config.second_hops],
        lead=[report.verdict(*_answer(runs), tone="none" if _sparsest(runs) else "warn")],
        lines=[_answer(runs)[0], *findings(runs)],
    )


def findings(runs: Sequence[TwoHopRun]) -> list[str]:
    """A line for each model, kind of transcoder and sparsity: means and ranges over seeds."""
    lines = []
    for second_hop, window, sparsity, some in _groups(runs):
        unexplained = np.mean([run.paths.unexplained_result for run in some])
        lines.append(
            f"{second_hop}, {KINDS[window]}, sparsity {sparsity:g}: "
            f"{_spread(some, 'two_hops')} in two hops, {_spread(some, 'merged')} merged, "
            f"{np.mean([r.paths.l0 for r in some]):.2f} features active, "
            f"{unexplained:.1%} of the results unexplained"
        )
    return lines


def _groups(runs: Sequence[TwoHopRun]) -> list[tuple[str, int, float, list[TwoHopRun]]]:
    def key(run: TwoHopRun) -> tuple[str, int, float]:
        return run.second_hop, run.window, run.sparsity

    return [(*each, [r for r in runs if key(r) == each]) for each in dict.fromkeys(map(key, runs))]


def _spread(runs: Sequence[TwoHopRun], name: str) -> str:
    values = [getattr(run.paths, name) for run in runs]
    text = f"{np.mean(values):.1%}"
    if len(values) > 1:
        text += f" ({min(values):.1%} to {max(values):.1%})"
    return text


def _sparsest(runs: Sequence[TwoHopRun]) -> dict[str, list[TwoHopRun]]:
    """The sparsest cross-layer transcoders that have the results, by the second hop."""
    sparsest: dict[str, list[TwoHopRun]] = {}
    for hop, window, sparsity, group in _groups(runs):
        explains = max(run.paths.unexplained_result for run in group) <= EXPLAINED
        known = sparsest.get(hop)
        if window == 0 and explains and (known is None or sparsity > known[0].sparsity):
            sparsest[hop] = group
    return sparsest


def _answer(runs: Sequence[TwoHopRun]) -> tuple[str, str]:
    """What the sparsest cross-layer transcoders that have the results do; on what it rests."""
    parts = [
        f"{_spread(group, 'merged')} of the results ({hop})"
        for hop, group in _sparsest(runs).items()
    ]
    if not parts:
        return (
            f"No cross-layer transcoder explains {1 - EXPLAINED:.0%} of the results.",
            "Train for more updates, or with less sparsity.",
        )
    return (
        f"The sparsest cross-layer transcoders write {' and '.join(parts)} from the first layer.",
        f"Of those that explain at least {1 - EXPLAINED:.0%} of the results with every seed; mean "
        "and range over seeds. The models compute all results in two hops.",
    )


def paths(config: TwoHopConfig, runs: Sequence[TwoHopRun], second_hop: str) -> Section:
    """Paths of one model by sparsity, as curves and as a table of its runs."""
    runs = [run for run in runs if run.second_hop == second_hop]
    seeds = f"{len(config.seeds)} seeds, {config.steps:,} updates"

    def series(name: str, window: int) -> Series:
        some = [(x, group) for _, w, x, group in _groups(runs) if w == window]
        values = [[getattr(run.paths, name) for run in group] for _, group in some]
        return Series(
            f"{KINDS[window]}: {name.replace('_', ' ')}",
            [x for x, _ in some],
            [100 * float(np.mean(each)) for each in values],
            [100 * min(each) for each in values],
            [100 * max(each) for each in values],
        )

    names = {0: ("merged", "two_hops"), 1: ("from_bits", "two_hops")}
    return section(
        f"Paths to the results ({second_hop})",
        _PROSE("toy", second_hop, 4 * config.groups, config.features),
        report.curves(
            [series(name, window) for window in config.windows for name in names[window]],
            caption="Share of what is written to results, by path; bands are the range over seeds.",
            x_label="sparsity coefficient",
            y_label="share, %",
            n=seeds,
            log_x=True,
        ),
        table_of(
            runs,
            [
                Column("Transcoder", value=lambda run: KINDS[run.window]),
                Column("Sparsity", "g", lambda run: run.sparsity),
                Column("Seed", "d", lambda run: run.seed),
                Column("Two hops, %", ".1f", lambda run: 100 * run.paths.two_hops),
                Column("From bits, %", ".1f", lambda run: 100 * run.paths.from_bits),
                Column("Merged, %", ".1f", lambda run: 100 * run.paths.merged),
                Column("Active", ".2f", lambda run: run.paths.l0),
                Column("Unexplained, %", ".1f", lambda run: 100 * run.paths.unexplained),
                Column("of the results, %", ".1f", lambda run: 100 * run.paths.unexplained_result),
            ],
            caption="All transcoders, measured on every input with its probability.",
        ),
    )

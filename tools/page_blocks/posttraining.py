"""Tables of post-trainings: their runs, how they went, and what their open edges lead to."""

from typing import Any

import pyarrow.parquet as pq

from tools.page_blocks.sources import ROOT, interval, summary, table


def posttraining(*names: str) -> str:
    """Open edges, divergence and loss of each run of some post-trainings.

    The edges of a query are those of one head, of a mean of (context + 1) / 2 visible ones.
    """
    rows = []
    for name in names:
        found = summary(name)
        visible = (found["context"] + 1) / 2
        rows += [
            (
                f"{run['target']:.2f}",
                str(run["seed"]),
                interval(run["edges"], ".2f", 100),
                f"{visible * run['edges']['estimate']:.1f}",
                interval(run["divergence"], ".4f"),
                interval(run["difference"], "+.4f"),
            )
            for run in found["runs"]
        ]
    heads = ("bound", "seed", "open edges, %", "of a query", "divergence", "loss minus dense")
    return table(heads, rows)


def over_updates(*names: str) -> str:
    """Share of open edges and divergence of held-out text over the updates of every run.

    Args:
      *names: stored results with the `evaluations.parquet` of each run.
    """
    columns, by_step = [], {}
    for name in names:
        for run in summary(name)["runs"]:
            columns.append(f"{run['target']:.2f}, {run['seed']}")
            file = ROOT / "results" / name / run["folder"] / "evaluations.parquet"
            for row in pq.read_table(file).to_pylist():
                cell = by_step.setdefault(row["step"], {}).setdefault(columns[-1], {})
                cell[row["name"]] = row["value"]
    rows = [
        (f"{step:,}", *(_at(cells.get(column)) for column in columns))
        for step, cells in sorted(by_step.items())
    ]
    return table(("updates", *columns), rows)


def _at(values: dict[str, float] | None) -> str:
    if not values:
        return "–"
    return f"{100 * values['validation/edges']:.2f} at {values['validation/divergence']:.3f}"


def kinds(*names: str) -> str:
    """What the open edges of each run lead to, in % of them."""
    runs = [run for name in names for run in summary(name)["runs"] if run.get("kinds")]
    heads = list(runs[0]["kinds"])
    return table(("bound, seed", *heads), [_shares(run, heads) for run in runs])


def _shares(run: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    label = f"{run['target']:.2f}, {run['seed']}"
    return label, *(f"{100 * run['kinds'][each]:.1f}" for each in names)

"""The numbers of all runs of one post-training, over seeds, and the lines that a terminal shows.

Two things make a number uncertain. An interval resamples documents: it holds for the one model that
was trained. Another seed trains another model, and so does another processor or number of threads,
because sums are then rounded in another order; the range over seeds shows how far they differ.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import statistics
from typing import Any

Found = Mapping[str, Any]
ONE_RUN = "one run"
OF_INTERVALS = (
    "intervals: 95 %, over documents, of one trained model; another seed, processor or number of "
    "threads trains another"
)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A number over seeds: its mean, its least and greatest, and how many runs it is of."""

    mean: float
    least: float
    most: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of one number of several runs."""
    return Spread(statistics.fmean(values), min(values), max(values), len(values))


def by_bound(result: Sequence[Found], dense: float) -> list[dict[str, Any]]:
    """Every bound with its share of edges and its losses over all seeds.

    Args:
      result: numbers of runs, in order of seeds, each with all bounds in one order.
      dense: loss of the dense model.
    """
    rows = []
    for target in dict.fromkeys(run["target"] for run in result):
        own = [run for run in result if run["target"] == target]
        controlled = all(run["over_control"] is not None for run in own)
        rows.append(
            {
                "target": target,
                "slack": target - dense,
                "seeds": [run["seed"] for run in own],
                **{name: _over(own, name) for name in ("edges", "loss", "difference")},
                "over_control": _over(own, "over_control") if controlled else None,
            }
        )
    return rows


def _over(result: Sequence[Found], name: str) -> Spread:
    return spread([run[name]["estimate"] for run in result])


def format_summary(summary: Found) -> str:
    """What a terminal shows of `summary.json`."""
    return "\n".join(_lines(summary))


def _lines(summary: Found) -> Iterator[str]:
    yield (
        f"dense: {summary['dense_loss']:.4f} nats per token over "
        f"{summary['validation_tokens']:,} tokens of {summary['corpus']['source']}"
    )
    several = len(summary["seeds"]) > 1
    for bound in summary["bounds"]:
        own = [run for run in summary["runs"] if run["target"] == bound["target"]]
        if several:
            yield f"target {bound['target']:.4f}, {len(own)} seeds: {_between_seeds(bound)}"
        for run in own:
            head = f"  seed {run['seed']}" if several else f"target {run['target']:.4f}, {ONE_RUN}"
            yield f"{head}: {_of_run(run)}"
            yield from _rounding(run)
    for control in summary["controls"]:
        seed = f"seed {control['seed']}" if several else ONE_RUN
        less = format_signed(control["difference"])
        yield f"control, every gate open, {seed}: loss {less} against dense"
        yield from _rounding(control)
    yield OF_INTERVALS


def _between_seeds(bound: Found) -> str:
    edges = Spread(**bound["edges"])
    parts = [
        f"{100 * edges.mean:.2f} % of edges open ({100 * edges.least:.2f} to "
        f"{100 * edges.most:.2f} between seeds)",
        f"loss {format_spread(bound['difference'])} against dense",
    ]
    if bound["over_control"]:
        parts.append(f"{format_spread(bound['over_control'])} against the control")
    return ", ".join(parts)


def _of_run(run: Found) -> str:
    edges = run["edges"]
    parts = [
        f"{100 * edges['estimate']:.2f} % of edges open ({100 * edges['low']:.2f} to "
        f"{100 * edges['high']:.2f})",
        f"loss {format_signed(run['difference'])} against dense",
    ]
    if run["over_control"]:
        parts.append(f"{format_signed(run['over_control'])} against the control")
    return ", ".join([*parts, f"{run['tokens_seen']:,} tokens seen"])


def _rounding(run: Found) -> Iterator[str]:
    if line := format_rounding(run["rounding"]):
        yield f"  {line}"


def format_rounding(rounding: Found | None) -> str:
    """What merging adapters into weights of few digits cost; "" where it costs nothing."""
    if rounding is None or not rounding["update_lost"]:
        return ""
    return (
        f"merged into {rounding['dtype']} weights: rounding takes "
        f"{rounding['update_lost']:.1%} of the update, and the loss goes from "
        f"{rounding['loss_before']:.4f} to {rounding['loss_after']:.4f}; "
        "--config.export_dtype=float32 --resume=force exports it again without rounding"
    )


def format_spread(spread: Found) -> str:
    """A difference of losses over seeds."""
    return "{mean:+.4f} ({least:+.4f} to {most:+.4f} between seeds)".format_map(spread)


def format_signed(interval: Found) -> str:
    """A difference of losses with its interval."""
    return "{estimate:+.4f} ({low:+.4f} to {high:+.4f})".format_map(interval)

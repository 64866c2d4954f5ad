"""Tables of a post-training: its runs, and what their open edges lead to."""

from typing import Any

from tools.page_blocks.sources import interval, summary, table


def posttraining(name: str) -> str:
    """Open edges, divergence and loss of each run of a post-training."""
    found = summary(name)
    rows = [
        (
            f"{run['target']:.3f}",
            str(run["seed"]),
            interval(run["edges"], ".2f", 100),
            interval(run["divergence"], ".4f"),
            interval(run["difference"], "+.4f"),
            f"{run['steps']:,} updates, {run['tokens_seen']:,} tokens",
        )
        for run in found["runs"]
    ]
    heads = ("bound", "seed", "open edges, %", "divergence", "loss minus dense", "trained on")
    return table(heads, rows)


def kinds(name: str) -> str:
    """What the open edges of each run lead to, in % of them."""
    runs = [run for run in summary(name)["runs"] if run.get("kinds")]
    names = list(runs[0]["kinds"])
    return table(("bound, seed", *names), [_shares(run, names) for run in runs])


def _shares(run: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    label = f"{run['target']:.3f}, {run['seed']}"
    return label, *(f"{100 * run['kinds'][each]:.1f}" for each in names)

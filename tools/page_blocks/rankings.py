"""Tables of prospective tests of rankings: `iaj polyattn rankings`."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from tools.page_blocks.sources import ROOT, summary, table

# What is marked.
LEVEL = 0.05
# What the page shows of each test.
OUTCOMES = ("text_untrained", "text_logits")


def rankings(*names: str) -> str:
    """Rank correlation of each statistic with the loss of hybrids, and what the ranking gains.

    Args:
      *names: stored results, each a column group of one model and recipe.
    """
    results = [summary(name) for name in names]
    statistics = dict.fromkeys(each["statistic"] for found in results for each in found["results"])
    heads = ["rank by"]
    for found in results:
        of = f"{found['model']}, {found['recipe']}{_seed(found)}"
        heads += [f"{of}: untrained", "trained", "gain, nats", "random sets beaten"]
    rows = []
    for name in statistics:
        row = [name]
        for found in results:
            own = {e["outcome"]: e for e in found["results"] if e["statistic"] == name}
            row += [_rank(own.get(outcome)) for outcome in OUTCOMES]
            last = own.get(OUTCOMES[-1])
            row += [
                _gain(last),
                f"{last['beaten']} of {last['of']}" if last and last["of"] else "–",
            ]
        rows.append(tuple(row))
    return table(tuple(heads), rows)


def ranking_runs(*names: str) -> str:
    """What each test has trained and measured."""
    rows = []
    for name in names:
        found = summary(name)
        shares = ", ".join(f"{share:g}" for share in found["replaced"])
        rows.append(
            (
                found["model"],
                found["recipe"],
                f"{found['groups']} {found['by'].replace('_', ' ')}s",
                f"{shares} %",
                ", ".join(map(str, found["provenance"]["seeds"].values())),
                str(found["sets"]),
                f"{found['first_tokens']:,}",
                f"{found['second_tokens']:,}",
                f"{found['text_softmax']:.3f}",
                f"{found['right_softmax']} of {found['prompts']} ({found['task']})",
            )
        )
    heads = ("model", "recipe", "groups", "replaced", "seeds", "hybrids")
    of_training = ("tokens, stage 1", "stage 2", "softmax, nats per token", "right answers")
    return table((*heads, *of_training), rows)


def chosen_hybrids(name: str) -> str:
    """What trained hybrids lose whose heads a statistic chose, and those of random sets.

    Args:
      name: a stored result of one seed with its `sets.parquet`.
    """
    found = summary(name)
    sets = pq.read_table(ROOT / "results" / name / "sets.parquet").to_pylist()
    statistics = [*dict.fromkeys(each["statistic"] for each in found["results"]), "random"]
    rows = []
    for statistic in statistics:
        row = [statistic]
        for share in found["replaced"]:
            own = [
                each
                for each in sets
                if each["replaced"] == share and statistic in each["chosen_by"].split(",")
            ]
            for outcome, spec in (("text_logits", "+.2f"), ("right_logits", ".0f")):
                row.append(_mean([each[outcome] for each in own], spec))
        rows.append(tuple(row))
    heads = ["chosen by"]
    for share in found["replaced"]:
        heads += [f"{share:g} % replaced: nats", f"{share:g} %: right of {found['prompts']}"]
    return table(tuple(heads), rows)


def _seed(found: dict[str, Any]) -> str:
    """The seed of a test of one."""
    seeds = [*found["provenance"]["seeds"].values()]
    return f", seed {seeds[0]}" if len(seeds) == 1 else ""


def _mean(values: Sequence[float], spec: str) -> str:
    """The mean with its range; the value where there is one."""
    if not values:
        return "–"
    mean = f"{fmean(values):{spec}}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{spec}} to {max(values):{spec}})"


def _rank(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["correlation"] is None:
        return "–"
    mark = "*" if entry["p_value"] < LEVEL else ""
    return f"{entry['correlation']:+.2f}{mark} ({entry['low']:+.2f} to {entry['high']:+.2f})"


def _gain(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["gain"] is None:
        return "–"
    return f"{entry['gain']:+.3f} ({entry['gain_low']:+.3f} to {entry['gain_high']:+.3f})"

"""The ledger of claims: docs/claims/ from published/*.toml.

A claim whose `results` name stored results has a Jinja template in `ours`, with the functions of
`_FUNCTIONS`. A claim without has no number of ours.
"""

import functools
import re
from typing import Any

import jinja2

from lm_jax.statistics import student_interval
from tools.bench.timing import ratio
from tools.page_blocks import concepts, kernels, robustness
from tools.page_blocks.circuits import fewer
from tools.page_blocks.graphs import fewer_carriers
from tools.page_blocks.paper_tables import compared
from tools.page_blocks.sources import BRACKETS, interval, published, summary, table
from tools.page_blocks.timings import forward_passes

_MEASURED = ("measured", "in small")
_REFERENCES = ("as ", "see ", "those of ", "drawn in ")


def ledger(paper: str) -> str:
    """Every table and figure of a paper: its claim, our command, our value and the verdict."""
    return table(
        (
            "item",
            "what it shows",
            "claim of the paper",
            "command",
            "ours, n, 95 % interval",
            "verdict, cause of difference",
            "state",
        ),
        (
            (
                claim["item"],
                claim["shows"],
                claim["claim"],
                claim["command"],
                our_value(claim),
                verdict(claim),
                claim["state"],
            )
            for claim in published(paper)["claim"]
        ),
    )


def verdict(claim: dict[str, Any]) -> str:
    """What our value says of the claim, with its numbers rendered as those of `our_value`.

    Raises:
      jinja2.UndefinedError: its template asks for what a result does not have.
      ValueError: it judges what no result of the claim supports.
    """
    text = claim["verdict"]
    if claim.get("results"):
        return _TEMPLATES.from_string(text).render()
    if re.search(r"\d", text) and not text.startswith(_REFERENCES):
        raise ValueError(f"{claim['item']} has a number in its verdict without `results`")
    return text


def our_value(claim: dict[str, Any]) -> str:
    """Our value of a claim, rendered from its results.

    Raises:
      jinja2.UndefinedError: its template asks for what a result does not have.
      ValueError: it has a number of ours, or says that it was measured, and names no result.
    """
    ours = claim["ours"]
    if claim.get("results"):
        return _TEMPLATES.from_string(ours).render()
    if ours.startswith(_REFERENCES):
        return ours
    if re.search(r"\d", ours) or claim["state"].startswith(_MEASURED):
        raise ValueError(f"{claim['item']} has a value of ours without `results` that it is from")
    return ours


def _sparse_run(name: str) -> dict[str, Any]:
    return summary(name)["variants"][0]["runs"][0]


def _test_perplexities(name: str, model: str) -> list[float]:
    """Test perplexities of a model by run, in the order of the seeds of the study."""
    order = (234, 124, 325)
    runs = [run for run in summary(name)["finished"] if run["model"] == model]
    runs.sort(key=lambda run: order.index(run["seed"]))
    return [run["test_perplexity"] for run in runs]


def _each_run(name: str, model: str) -> str:
    return " and ".join(f"{value:.1f}" for value in _test_perplexities(name, model))


def _over_seeds(name: str, model: str) -> str:
    mean = student_interval(_test_perplexities(name, model))
    return f"{mean.estimate:.1f} [{mean.low:.1f}, {mean.high:.1f}]"


def _step_ratio(name: str, over: str, under: str) -> str:
    seconds = summary(name)["step"]["seconds"]
    return str(ratio(seconds[over], seconds[under]))


def _forward_ratio(name: str, length: int, over: str) -> str:
    seconds = forward_passes(name)[0][str(length)]
    return str(ratio(seconds[over], seconds["protot"]))


def _kernel_speed(name: str, case: str, what: str, baseline: str) -> str:
    rows = [
        row
        for row in summary(name)["rows"]
        if (row["case"], row["what"], row["baseline"]) == (case, what, baseline)
    ]
    if len(rows) != 1:
        raise ValueError(f"{name} has {len(rows)} rows of {case}, {what}, {baseline}, not one")
    return kernels.speed(rows[0])


_TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
_FUNCTIONS: dict[str, Any] = {
    "compared_models": robustness.compared_models,
    "compared": compared,
    "concept_effect": concepts.concept_effect,
    "each_run": _each_run,
    "entropies": concepts.entropies,
    "fewer": fewer,
    "fewer_carriers": fewer_carriers,
    "forward_ratio": _forward_ratio,
    "greatest_held": robustness.greatest_held,
    "half_life": concepts.half_life,
    "interval": functools.partial(interval, form=BRACKETS),
    "judged": functools.partial(concepts.judged, form=BRACKETS),
    "kernel_speed": _kernel_speed,
    "lead": concepts.lead,
    "least_and_most": robustness.least_and_most,
    "lowered": robustness.lowered,
    "over_seeds": _over_seeds,
    "sparse_run": _sparse_run,
    "step_ratio": _step_ratio,
    "summary": summary,
}
_TEMPLATES.globals.update(_FUNCTIONS)

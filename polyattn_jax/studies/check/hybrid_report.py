"""Page and terminal summary of the search for heads that may have a recipe."""

from pathlib import Path
import textwrap
from typing import Any

import numpy as np

from lm_jax import report
from lm_jax.console.terminal import format_table
from lm_jax.report import Column, Report, Section, Series, section, table_of
from lm_jax.report.markup import number
from lm_jax.report.tables import interval_text, rate
from polyattn_jax.audit import head_sets, ranking
from polyattn_jax.audit.bias_tables import describe
from polyattn_jax.audit.results import ConditionResult, HeadSet, HybridResult, SingleHead
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.report.figures import banded
from polyattn_jax.report.recipes import FEW_PROMPTS
from polyattn_jax.studies.check.hybrid import HEADS

TERMS = {
    "K": "Number of heads that keep softmax; all others have the recipe.",
    "change": "Loss under the recipe minus that under softmax, nats per token, on the texts that "
    "did not rank the heads.",
    "cost most": "The K heads of highest cost, by the statistic that the search ranks by: by "
    "default the rise of the loss on the other texts with the recipe in one head alone.",
    "state": "Bytes that a prompt keeps in decoding, of softmax's cache and of the recipe's state.",
    "front": "No other set tried is as good in state, loss and every task, and better in one "
    "(the Pareto front, by estimates).",
    "key heads freed": "Key heads whose cache goes: no softmax head reads them any more, and the "
    "recipe keeps a state of a fixed size. Under a recipe without one all caches stay.",
    "accepted": "The whole interval of the change is below the limit, the verdict on every task is "
    "preserve, and the state is within the bytes of --max_state, if that is given. The best of the "
    "sets tried: its own interval is a little too good.",
    "interval": "95 %: of a change, Student's t over texts; of a task, Wilson's over prompts.",
}


def build(result: HybridResult, target: Path, folder: Path) -> Report:
    """The report of a search.

    Args:
      result: what was found.
      target: file that the heads were to be saved to.
      folder: work folder, which has them too.
    """
    return Report(
        f"Which heads may go: {Path(result.model).name}, {result.recipe}",
        lambda: sections(result),
        lead=[report.verdict(conclusion(result), f"S{_softmax(result)[1:]}")],
        lines=[format_hybrid(result), *_saved(result, target, folder)],
        facts={"config_hash": result.provenance.config_hash},
    )


def sections(result: HybridResult) -> list[Section]:
    """The sections of the page."""
    return [_frontier(result), _heads(result), section("Terms", report.key_values(TERMS))]


def _saved(result: HybridResult, target: Path, folder: Path) -> list[str]:
    """Where the heads are; nothing where none are accepted."""
    if result.best is None:
        return []
    where = f"Saved to {target}"
    if not target.is_file():
        where = f"{target} is not there any more; {folder / HEADS} holds the same heads"
    return ["", where, "polyattn_jax.load_recipe(FILE, model) reads it."]


def conclusion(result: HybridResult) -> str:
    """How many heads can have the recipe, in one sentence."""
    total = result.layers * result.heads
    kept = "the needle" if result.tasks == ("needle",) else ", ".join(result.tasks)
    limit = f"{result.search.max_loss:g} nats per token on text and preserve {kept}"
    if result.search.max_state:
        limit += f", in at most {result.search.max_state:g} % of the bytes of softmax's cache"
    if result.best is None:
        return f"No set of heads is shown to lose less than {limit} under {result.recipe}."
    option = parse_recipe(result.recipe).option
    text = (
        f"{len(result.best.replaced)} of {total} heads can have {result.recipe} ("
        f"{option} = {describe(result.bias)}): they lose less than {limit}."
    )
    if not result.kv_heads:
        return text
    kept = total - len(result.best.replaced)
    (best,) = (each for each in result.frontier if (each.seed, each.kept) == (None, kept))
    if result.softmax_state and not best.freed:
        return f"{text} No cache goes."
    text += f" The cache of {best.freed} of {result.kv_heads} key heads goes"
    if not result.softmax_state:
        return f"{text}."
    share = 100 * best.state / result.softmax_state
    return f"{text}; {share:.0f} % of the bytes of softmax's cache are left."


def _softmax(result: HybridResult) -> str:
    base = result.softmax
    counts = ", ".join(
        f"{name} {head_sets.right(own.accuracy)} of {own.accuracy.n}"
        for name, own in zip(result.tasks, _of_softmax(result), strict=True)
    )
    return (
        f"softmax: {base.loss.estimate:.3f} nats per token on {base.loss.n} texts, {counts}."
        f"{_caution(result)}"
    )


def _of_softmax(result: HybridResult) -> tuple[ConditionResult, ...]:
    """The results of softmax on all tasks in their order."""
    return (result.softmax_needle, *result.softmax_others.values())


def _caution(result: HybridResult) -> str:
    """What weakens the intervals over texts, or nothing."""
    n, text = result.softmax.loss.n, ""
    if n < FEW_PROMPTS:
        text += f" Few texts: {n}, where {FEW_PROMPTS} or more are wanted."
    if result.documents < n + result.search_texts:
        plural = "s" * (result.documents != 1)
        text += (
            f" The texts are windows of {result.documents} document{plural}, which alternate "
            "between search and measurement: they are not independent, and intervals are too "
            "narrow."
        )
    return text


def _frontier(result: HybridResult) -> Section:
    ranked = [entry for entry in result.frontier if entry.seed is None]
    draws = [[e for e in result.frontier if e.seed == seed] for seed in range(result.search.draws)]
    lines = [_series("softmax in the heads that cost most", ranked)]
    lines += [_series(f"in random heads, {seed}", own) for seed, own in enumerate(draws) if own]
    total = result.layers * result.heads
    front, with_state = result.front, result.softmax_state > 0
    return section(
        "Frontier",
        report.curves(
            lines,
            caption="Heads that keep softmax against the loss of the hybrid; bands are intervals.",
            x_label="K, heads that keep softmax",
            y_label="change of the loss, nats per token",
            n=result.softmax.loss.n,
            h_lines=[(result.search.max_loss, "limit"), (0.0, "softmax")],
        ),
        table_of(
            result.frontier,
            [
                Column("K", "d", lambda e: e.kept),
                Column("Replaced", "d", lambda e: total - e.kept),
                *[Column("Key heads freed", "d", lambda e: e.freed)] * bool(result.kv_heads),
                *[Column("State, kB", ",.0f", lambda e: e.state / 1000)] * with_state,
                Column("Softmax in", value=_kept),
                Column("Change, nats", value=lambda e: rate(e.text.change, spec="+.3f", scale=1.0)),
                *(
                    column
                    for at, name in enumerate(result.tasks)
                    for column in (
                        Column(
                            name.capitalize(), value=lambda e, at=at: rate(e.answers[at].accuracy)
                        ),
                        Column("Verdict", value=lambda e, at=at: e.answers[at].verdict),
                    )
                ),
                *[Column("Front", value=lambda e: "yes" if e in front else "no")] * with_state,
                Column("Accepted", value=lambda e: "yes" if e.accepted else "no"),
            ],
            caption=f"On {result.softmax.loss.n} texts and "
            + ", ".join(
                f"{own.accuracy.n} prompts of {name}"
                for name, own in zip(result.tasks, _of_softmax(result), strict=True)
            )
            + ".",
        ),
    )


def _kept(entry: HeadSet) -> str:
    """Which heads keep softmax."""
    return "cost most" if entry.seed is None else f"random {entry.seed}"


def _series(label: str, entries: list[HeadSet]) -> Series:
    changes = [entry.text.change for entry in entries]
    return banded(label, [entry.kept for entry in entries], changes, scale=1.0)


def _heads(result: HybridResult) -> Section:
    cost_LN = np.zeros((result.layers, result.heads))
    rank = result.search.rank
    words, of = ranking.WORDS[rank], _ranked_on(result)
    replaced = set(result.best.replaced) if result.best else set()
    titles = [[""] * result.heads for _ in range(result.layers)]
    for head in result.singles:
        cost_LN[head.layer, head.head] = head.value
        place = "recipe" if (head.layer, head.head) in replaced else "softmax"
        titles[head.layer][head.head] = place if replaced else f"rank {head.rank + 1}"
    return section(
        "Single heads",
        report.heat_map(
            cost_LN,
            caption=f"Cost of each head: {words}.",
            x_label="head",
            y_label="layer",
            value_label=words,
            scale="diverging" if rank in ("text", "task") else "sequential",
            titles=titles,
            n=result.search_texts,
        ),
        report.details(
            "All heads",
            table_of(
                _by_cost(result),
                [
                    Column("Head", value=lambda h: f"{h.layer}.{h.head}"),
                    Column("Cost", value=_cost),
                    Column(
                        "In the saved set",
                        value=lambda h: titles[h.layer][h.head] if replaced else None,
                    ),
                ],
                caption=f"Cost of each head, {words}, on {of}; layer.head.",
            ),
        ),
    )


def _cost(head: SingleHead) -> Any:
    """The cost of a head, with its interval where there is one."""
    if head.change is None:
        return number(head.value, "+.4f")
    return rate(head.change, spec="+.4f", scale=1.0)


def _ranked_on(result: HybridResult) -> str:
    """What the heads were ranked on."""
    if result.search.rank == "task":
        return "prompts that were held back"
    return f"{result.search_texts} other texts"


def _by_cost(result: HybridResult) -> list[SingleHead]:
    """The heads by what they cost alone, most first."""
    return sorted(result.singles, key=lambda head: head.rank)


def format_hybrid(result: HybridResult) -> str:
    """The frontier and the accepted heads as plain text of at most 80 columns."""
    total = result.layers * result.heads
    head = (
        f"{result.recipe} ({parse_recipe(result.recipe).option} = {describe(result.bias)}) in all "
        f"heads of {result.model} but K; "
        f"{_softmax(result)}"
    )
    rows = [
        (
            f"{entry.kept}",
            f"{total - entry.kept}",
            *[f"{entry.state / 1000:,.0f}"] * bool(result.softmax_state),
            _kept(entry),
            interval_text(entry.text.change, "+.3f"),
            *(
                cell
                for own in entry.answers
                for cell in (f"{head_sets.right(own.accuracy)}", own.verdict)
            ),
        )
        for entry in result.frontier
    ]
    of_tasks = [head for name in result.tasks for head in (name, "verdict")]
    state = ["state, kB"] * bool(result.softmax_state)
    heads = ("K", "replaced", *state, "softmax in", "change, nats [95 %]", *of_tasks)
    lines = [*textwrap.wrap(conclusion(result), 80), "", *textwrap.wrap(head, 80), ""]
    at = 2 + len(state)
    lines += [format_table(heads, rows, left=(at, *range(at + 3, len(heads), 2))), ""]
    text = "heads that cost most: " + ", ".join(
        f"{h.layer}.{h.head} {number(h.value, '+.3f')}" for h in _by_cost(result)[:10]
    )
    words = ranking.WORDS[result.search.rank]
    lines += textwrap.wrap(f"{text} (layer.head; {words}; {_ranked_on(result)})", 80)
    if result.best is None:
        return "\n".join(lines)
    lines += ["", "Replaced:"]
    for layer in range(result.layers):
        own = [str(head) for at, head in result.best.replaced if at == layer]
        if own:
            lines.append(f"  layer {layer}: {' '.join(own)}")
    return "\n".join(lines)

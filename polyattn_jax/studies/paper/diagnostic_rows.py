"""What score rows say beside the paper: every table and figure of S_p, and of its ranking."""

from collections.abc import Iterator
import functools

from lm_jax.statistics import Interval
from polyattn_jax.audit import head_types
from polyattn_jax.audit.results import MatchedSafety
from polyattn_jax.audit.schema import BIASES
from polyattn_jax.report import comparability, findings, paper
from polyattn_jax.studies.paper import tables
from polyattn_jax.studies.paper.answer_rows import needle_differences
from polyattn_jax.studies.paper.beside import Audit, differences, openings_differ, row
from polyattn_jax.studies.paper.results import ComparedNumber
from polyattn_jax.suites import named

SIZES = (20, 40, 80)
KINDS = ("sink", "local", "diffuse")


def prevalence(audit: Audit) -> Iterator[ComparedNumber]:
    """Tables 1, 10 and 11, and 31 on the RULER prompts."""
    config, beside = audit.summary.config, audit.beside
    for entry in audit.summary.prevalence:
        base, kind = named.split(entry.suite)[0], entry.bias_kind
        length = findings.suite_length(entry.suite, config)
        if length is None or kind not in BIASES:
            continue
        if base == "ruler_paper_single" and kind == "auto":
            theirs = tables.RULER_UNSAFE.get(beside.name, {}) if beside else {}
            for p in paper.DEGREES:
                if str(p) in entry.unsafe_active:
                    yield row(
                        audit,
                        "Table 31",
                        "unsafe rows",
                        entry.unsafe_active[str(p)],
                        theirs.get(p),
                        suite=entry.suite,
                        cell=f"p = {p}, b_auto",
                        n=entry.prompts,
                        causes=differences(
                            audit, (length, 4000), (entry.prompts, 50), calibrated=True
                        ),
                    )
        if entry.suite not in ("induction", "mqar") and base != "copying":
            continue
        published = beside.prevalence_at(base, kind, length) if beside else None
        causes = ()
        if published is not None:
            lengths, prompts = (length, published.length), (entry.prompts, paper.PROMPTS)
            causes = (
                *differences(audit, lengths, prompts, calibrated=kind == "auto"),
                *openings_differ(base),
            )
        bias = findings.bias_label(kind)
        for p in (2, 4, 8) if kind == "zero" else (2,):
            if str(p) in entry.unsafe_active:
                yield row(
                    audit,
                    "Table 1" if kind == "zero" else "Table 11",
                    "unsafe rows",
                    entry.unsafe_active[str(p)],
                    published.unsafe.get(p) if published else None,
                    suite=entry.suite,
                    cell=f"p = {p}, {bias}",
                    n=entry.prompts,
                    causes=causes,
                )
        theirs = published.medians if published else None
        numbers = [("dead rows", entry.dead, theirs.dead if theirs else None, "%", 100.0)]
        if entry.median:
            numbers += [
                ("median S_2", entry.median.s_2, theirs.s_2 if theirs else None, "1", 1.0),
                (
                    "median relative margin",
                    entry.median.relative_margin,
                    theirs.relative_margin if theirs else None,
                    "1",
                    1.0,
                ),
                (
                    "median active distractors",
                    entry.median.active,
                    theirs.active if theirs else None,
                    "keys",
                    1.0,
                ),
            ]
        remarks = published.remarks if published else ()
        for quantity, ours, reference, unit, scale in numbers:
            yield row(
                audit,
                "Table 10" if kind == "zero" else "Table 11",
                quantity,
                ours,
                reference,
                suite=entry.suite,
                cell=bias,
                n=entry.prompts,
                unit=unit,
                scale=scale,
                causes=(*causes, *(remarks if quantity == "dead rows" else ())),
            )


def over_length(audit: Audit) -> Iterator[ComparedNumber]:
    """Figure 5: unsafe rows on induction over its length."""
    beside = audit.beside
    for entry in audit.summary.prevalence:
        length = findings.suite_length(entry.suite, audit.summary.config)
        known = named.split(entry.suite)[0] == "induction" and entry.bias_kind == "zero"
        if not known or length is None or "2" not in entry.unsafe_active:
            continue
        theirs, causes = None, ()
        if beside is not None:
            theirs = tables.OVER_LENGTH.get(beside.name)
            published = beside.prevalence_at("induction", "zero", length)
            if (
                theirs is None
                and published
                and not comparability.obstacles((length, published.length))
            ):
                theirs = published.unsafe[2]
            nearest = min(max(length, 256), 4096)
            prompts = (entry.prompts, paper.PROMPTS)
            causes = differences(audit, (length, nearest), prompts, calibrated=False)
        yield row(
            audit,
            "Figure 5",
            "unsafe rows",
            entry.unsafe_active["2"],
            theirs,
            suite=entry.suite,
            cell=f"p = 2, b = 0, {length:,} tokens",
            n=entry.prompts,
            causes=causes,
        )


def calibration(audit: Audit) -> Iterator[ComparedNumber]:
    """Appendix J: b_auto."""
    result = audit.summary.calibration
    yield row(
        audit,
        "Appendix J",
        "b_auto",
        Interval(result.bias, result.low, result.high, result.texts),
        audit.beside.b_auto if audit.beside else None,
        suite="calibration texts",
        cell=f"{result.length:,} tokens",
        n=result.texts,
        unit="1",
        scale=1.0,
        causes=tuple(comparability.calibration_obstacles(audit.summary)),
    )


def matched(audit: Audit) -> Iterator[ComparedNumber]:
    """Tables 5 (with the intervals of 13), 12 and 14: rows of the needle prompts."""
    summary, beside = audit.summary, audit.beside.name if audit.beside else ""
    suite = named.key("niah", summary.config.sweep_length)
    by_recipe = {entry.recipe: entry for entry in summary.sweep}
    known = set().union(*tables.MATCHED.values())
    for entry in summary.matched:
        if entry.recipe not in known:
            continue
        causes = needle_differences(audit, by_recipe[entry.recipe])
        for item, quantity, ours, theirs, ends in _matched_numbers(entry, beside):
            if ours is not None:
                yield row(
                    audit,
                    item,
                    quantity,
                    ours,
                    theirs,
                    suite=suite,
                    cell=entry.recipe,
                    n=summary.config.niah_n,
                    ends=ends,
                    causes=causes,
                )
        theirs = tables.MATCHED.get(beside, {}).get(entry.recipe)
        of_rows = (suite, entry.bias_kind, entry.p)
        for one in summary.bound:
            if (one.suite, one.bias_kind, one.p) == of_rows:
                yield row(
                    audit,
                    "Table 5",
                    "false negatives",
                    one.false_negative,
                    theirs.false_negative if theirs else None,
                    suite=suite,
                    cell=entry.recipe,
                    n=summary.config.niah_n,
                    unit="rows",
                    scale=1.0,
                    causes=causes,
                )


def _matched_numbers(
    entry: MatchedSafety, beside: str
) -> Iterator[tuple[str, str, Interval | None, float | None, tuple[float, float] | None]]:
    """Table, quantity, our share, the paper's and its interval."""
    theirs = tables.MATCHED.get(beside, {}).get(entry.recipe)
    ends = tables.ENDS.get(beside, {}).get(entry.recipe)
    answer = tables.ANSWER_KEY.get(beside, {}).get(entry.recipe)
    for item, what, name, ours in (
        ("Table 5", "safe rows", "measured", entry.all.measured),
        ("Table 5", "rows predicted safe", "predicted", entry.all.predicted),
        ("Table 5", "safe rows, top K heads", "top_measured", entry.top.measured),
        ("Table 5", "rows predicted safe, top K heads", "top_predicted", entry.top.predicted),
        ("Table 12", "safe rows, own top K heads", "own_top_measured", entry.own_top.measured),
        (
            "Table 12",
            "rows predicted safe, own top K heads",
            "own_top_predicted",
            entry.own_top.predicted,
        ),
    ):
        yield item, what, ours, getattr(theirs, name, None), getattr(ends, name, None)
    of_answer = entry.answer_argmax
    for what, name, ours in (
        ("rows whose best key is the answer", "argmax", entry.answer_is_argmax),
        ("rows whose answer key is dead", "dead", entry.answer_dead),
        ("safe rows, if the best key is the answer", "measured", of_answer.measured),
        ("rows predicted safe, if so", "predicted", of_answer.predicted),
        ("safe rows, if so, top K heads", "top_measured", entry.answer_argmax_top.measured),
        (
            "rows predicted safe, if so, top K heads",
            "top_predicted",
            entry.answer_argmax_top.predicted,
        ),
    ):
        yield "Table 14", what, ours, getattr(answer, name, None), None


def sigmoid(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 15: rows of the needle prompts that the sigmoid concentrates."""
    summary, beside = audit.summary, audit.beside.name if audit.beside else ""
    by_recipe = {entry.recipe: entry for entry in summary.sweep}
    known = set().union(*tables.SIGMOID_SAFE.values())
    for entry in summary.verdicts:
        if entry.recipe in known and entry.safe is not None:
            yield row(
                audit,
                "Table 15",
                "safe rows",
                entry.safe,
                tables.SIGMOID_SAFE.get(beside, {}).get(entry.recipe),
                suite=named.key("niah", summary.config.sweep_length),
                cell=entry.recipe,
                n=summary.config.niah_n,
                causes=needle_differences(audit, by_recipe[entry.recipe]),
            )


def bound(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 8: predicted against measured safety on induction at b = 0."""
    config, theirs = audit.summary.config, audit.beside.bound if audit.beside else None
    published = audit.beside.prevalence_at("induction", "zero", 4096) if audit.beside else None
    rows = published.medians.rows if published and published.medians else 0
    lengths, prompts = (config.induction_length, 4096), (config.induction_n, paper.PROMPTS)
    causes = differences(audit, lengths, prompts, calibrated=False)
    for entry in audit.summary.bound:
        if (entry.suite, entry.bias_kind) != ("induction", "zero") or entry.agree is None:
            continue
        if entry.p not in paper.DEGREES:
            continue
        agree = 100 * theirs.agree[int(entry.p)] if theirs else None
        of_degree = functools.partial(
            row,
            audit,
            "Table 8",
            suite="induction",
            cell=f"p = {entry.p}, b = 0",
            n=config.induction_n,
        )
        yield of_degree("bound and measure agree", entry.agree, agree, causes=causes)
        if entry.p != 2:
            continue
        of_rows = (*causes, f"{entry.n:,} rows (paper: about {rows:,})")
        in_rows = functools.partial(of_degree, unit="rows", scale=1.0, causes=of_rows)
        missed, flagged = (theirs.false_negative, theirs.false_positive) if theirs else (None,) * 2
        yield in_rows("false negatives", entry.false_negative, missed)
        yield in_rows("false positives", entry.false_positive, flagged)
        beyond = 0.0 if theirs else None
        yield in_rows("false negatives beyond 1e-6", entry.false_negative_eps, beyond)


def types_of_heads(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 16: types of the heads at both ends of the ranking."""
    if audit.summary.head_types is None:
        return
    config = audit.summary.config
    n = min(config.induction_n, head_types.PROMPTS)
    theirs = tables.COMPOSITION.get(audit.beside.name, {}) if audit.beside else {}
    for size in SIZES:
        if 2 * size > len(audit.by_head["type"]):
            continue
        ours = head_types.composition(audit.by_head, size)
        kinds = [(group, kind) for group in ("top", "bottom") for kind in KINDS]
        printed = theirs.get(size, (None,) * len(kinds))
        for (group, kind), reference in zip(kinds, printed, strict=True):
            yield row(
                audit,
                "Table 16",
                f"{kind} heads",
                getattr(ours, group)[kind],
                reference,
                suite="induction",
                cell=f"{group} {size}",
                n=n,
                unit="heads",
                scale=1.0,
                causes=differences(
                    audit, (config.induction_length, 1024), (n, head_types.PROMPTS), calibrated=True
                ),
            )

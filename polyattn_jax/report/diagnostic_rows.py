"""What score rows say beside the paper: every table and figure of S_p, and of its ranking."""

from collections.abc import Iterator
import functools
import itertools

from lm_jax.statistics import Interval
from polyattn_jax.audit import head_types
from polyattn_jax.audit.results import MatchedSafety
from polyattn_jax.audit.schema import BIASES
from polyattn_jax.report import comparability, findings, paper
from polyattn_jax.report.answer_rows import needle_differences
from polyattn_jax.report.beside import Audit, ComparedNumber, differences, openings_differ, row
from polyattn_jax.report.paper import SETTINGS, PaperModel
from polyattn_jax.suites import named

SIZES = (20, 40, 80)
KINDS = ("sink", "local", "diffuse")


def prevalence(audit: Audit) -> Iterator[ComparedNumber]:
    """Tables 1, 10 and 11, with 18 and 23 of further models, and 31 on the RULER prompts."""
    for entry in audit.summary.prevalence:
        base, kind = named.split(entry.suite)[0], entry.bias_kind
        length = findings.suite_length(entry.suite, audit.summary.config)
        if length is None or kind not in BIASES:
            continue
        of_entry = functools.partial(row, audit, suite=entry.suite, n=entry.prompts)
        unsafe = {p: entry.unsafe_active.get(str(p)) for p in paper.DEGREES}
        if base == "ruler_paper_single" and kind == "auto":
            theirs = audit.printed.ruler_unsafe
            causes = differences(audit, (length, 4000), (entry.prompts, 50), calibrated=True)
            of_ruler = functools.partial(of_entry, "Table 31", "unsafe rows", causes=causes)
            for p, ours in unsafe.items():
                if ours is not None:
                    yield of_ruler(ours, theirs.get(p), cell=f"p = {p}, b_auto")
        published, causes = audit.printed.prevalence_at(base, kind, length), ()
        if entry.suite not in ("induction", "mqar") and base != "copying":
            # Another length than that of the suite itself, which the paper has too.
            itself = findings.suite_length(base, audit.summary.config)
            if published is None or length == itself:
                continue
            if comparability.obstacles((length, published.length)):
                continue
        if published is not None:
            lengths, prompts = (length, published.length), (entry.prompts, SETTINGS.prompts)
            causes = (
                *differences(audit, lengths, prompts, calibrated=kind == "auto"),
                *openings_differ(base),
            )
        bias = findings.bias_label(kind)
        for p in (2, 4, 8) if kind == "zero" else (2,):
            if (ours := unsafe[p]) is not None:
                yield of_entry(
                    "Table 1" if kind == "zero" else "Table 11",
                    "unsafe rows",
                    ours,
                    published.unsafe.get(p) if published else None,
                    cell=f"p = {p}, {bias}",
                    causes=causes,
                )
        theirs, remarks = (published.medians, published.remarks) if published else (None, ())
        of_bias = functools.partial(
            of_entry, "Table 10" if kind == "zero" else "Table 11", cell=bias
        )
        dead = getattr(theirs, "dead", None)
        yield of_bias("dead rows", entry.dead, dead, causes=(*causes, *remarks))
        for quantity, field, unit in (
            ("median S_2", "s_2", "1"),
            ("median relative margin", "relative_margin", "1"),
            ("median active distractors", "active", "keys"),
        ):
            if entry.median is not None:
                ours, printed = (getattr(each, field, None) for each in (entry.median, theirs))
                yield of_bias(quantity, ours, printed, unit=unit, causes=causes)


def over_length(audit: Audit) -> Iterator[ComparedNumber]:
    """Figure 5: unsafe rows on induction over its length."""
    for entry in audit.summary.prevalence:
        length = findings.suite_length(entry.suite, audit.summary.config)
        known = named.split(entry.suite)[0] == "induction" and entry.bias_kind == "zero"
        if not known or length is None or "2" not in entry.unsafe_active:
            continue
        theirs = audit.printed.over_length
        published = audit.printed.prevalence_at("induction", "zero", length)
        # The figure is of the four.
        if theirs is None and published and not audit.printed.tables:
            like = not comparability.obstacles((length, published.length))
            theirs = published.unsafe[2] if like else None
        lengths = (length, min(max(length, 256), 4096))
        prompts = (entry.prompts, SETTINGS.prompts)
        yield row(
            audit,
            "Figure 5",
            "unsafe rows",
            entry.unsafe_active["2"],
            theirs,
            suite=entry.suite,
            cell=f"p = 2, b = 0, {length:,} tokens",
            n=entry.prompts,
            causes=differences(audit, lengths, prompts, calibrated=False),
        )


def calibration(audit: Audit) -> Iterator[ComparedNumber]:
    """Appendix J: b_auto."""
    result = audit.summary.calibration
    yield row(
        audit,
        "Appendix J",
        "b_auto",
        Interval(result.bias, result.low, result.high, result.texts),
        audit.printed.b_auto,
        suite="calibration texts",
        cell=f"{result.length:,} tokens",
        n=result.texts,
        unit="1",
        causes=tuple(comparability.calibration_obstacles(audit.summary)),
    )


def matched(audit: Audit) -> Iterator[ComparedNumber]:
    """Tables 5 (with the intervals of 13), 12 and 14: rows of the needle prompts."""
    summary, printed = audit.summary, audit.printed
    by_recipe = {entry.recipe: entry for entry in summary.sweep}
    known = set().union(*(model.matched for model in paper.MODELS))
    suite = summary.config.probe
    for entry in summary.matched:
        if entry.recipe not in known:
            continue
        of_entry = functools.partial(
            row,
            audit,
            suite=suite,
            cell=entry.recipe,
            n=summary.config.niah_n,
            causes=needle_differences(audit, by_recipe[entry.recipe]),
        )
        for item, quantity, ours, theirs, ends in _matched_numbers(entry, printed):
            if ours is not None:
                yield of_entry(item, quantity, ours, theirs, ends=ends)
        theirs = getattr(printed.matched.get(entry.recipe), "false_negative", None)
        of_rows = (suite, entry.bias_kind, entry.p)
        for one in summary.bound:
            if (one.suite, one.bias_kind, one.p) == of_rows:
                missed = one.false_negative
                yield of_entry("Table 5", "false negatives", missed, theirs, unit="rows")


def _matched_numbers(
    entry: MatchedSafety, printed: PaperModel
) -> Iterator[tuple[str, str, Interval | None, float | None, tuple[float, float] | None]]:
    """Table, quantity, our share, the paper's and its interval."""
    theirs, ends = printed.matched.get(entry.recipe), printed.matched_ends.get(entry.recipe)
    for item, heads, prefix, shares in (
        ("Table 5", "", "", entry.all),
        ("Table 5", ", top K heads", "top_", entry.top),
        ("Table 12", ", own top K heads", "own_top_", entry.own_top),
    ):
        for what, ours, field in (
            ("safe rows", shares.measured, f"{prefix}measured"),
            ("rows predicted safe", shares.predicted, f"{prefix}predicted"),
        ):
            yield item, what + heads, ours, getattr(theirs, field, None), getattr(ends, field, None)
    best, best_top = entry.answer_argmax, entry.answer_argmax_top
    answer = printed.answer_key.get(entry.recipe)
    for what, ours, field in (
        ("rows whose best key is the answer", entry.answer_is_argmax, "argmax"),
        ("rows whose answer key is dead", entry.answer_dead, "dead"),
        ("safe rows, if the best key is the answer", best.measured, "measured"),
        ("rows predicted safe, if so", best.predicted, "predicted"),
        ("safe rows, if so, top K heads", best_top.measured, "top_measured"),
        ("rows predicted safe, if so, top K heads", best_top.predicted, "top_predicted"),
    ):
        yield "Table 14", what, ours, getattr(answer, field, None), None


def sigmoid(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 15: rows of the needle prompts that the sigmoid concentrates."""
    summary = audit.summary
    by_recipe = {entry.recipe: entry for entry in summary.sweep}
    known = set().union(*(model.sigmoid_safe for model in paper.MODELS))
    for entry in summary.verdicts:
        if entry.recipe in known and entry.safe is not None:
            yield row(
                audit,
                "Table 15",
                "safe rows",
                entry.safe,
                audit.printed.sigmoid_safe.get(entry.recipe),
                suite=summary.config.probe,
                cell=entry.recipe,
                n=summary.config.niah_n,
                causes=needle_differences(audit, by_recipe[entry.recipe]),
            )


def bound(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 8: predicted against measured safety on induction at b = 0."""
    config, theirs = audit.summary.config, audit.printed.bound
    published = audit.printed.prevalence_at("induction", "zero", 4096)
    rows = (published and published.medians and published.medians.rows) or 0
    lengths, prompts = (config.induction_length, 4096), (config.induction_n, SETTINGS.prompts)
    causes = differences(audit, lengths, prompts, calibrated=False)
    for entry in audit.summary.bound:
        if (entry.suite, entry.bias_kind) != ("induction", "zero") or entry.agree is None:
            continue
        if entry.p not in paper.DEGREES:
            continue
        agree = theirs.agree.get(int(entry.p))
        of_degree = functools.partial(
            row,
            audit,
            "Table 8",
            suite="induction",
            cell=f"p = {entry.p}, b = 0",
            n=config.induction_n,
        )
        yield of_degree(
            "bound and measure agree",
            entry.agree,
            None if agree is None else 100 * agree,
            causes=causes,
        )
        if entry.p != 2:
            continue
        of_rows = (*causes, f"{entry.n:,} rows (paper: about {rows:,})")
        in_rows = functools.partial(of_degree, unit="rows", causes=of_rows)
        yield in_rows("false negatives", entry.false_negative, theirs.false_negative)
        yield in_rows("false positives", entry.false_positive, theirs.false_positive)
        beyond = 0.0 if theirs.agree else None
        yield in_rows("false negatives beyond 1e-6", entry.false_negative_eps, beyond)


def types_of_heads(audit: Audit) -> Iterator[ComparedNumber]:
    """Table 16: types of the heads at both ends of the ranking."""
    if audit.summary.head_types is None:
        return
    config = audit.summary.config
    n = min(config.induction_n, head_types.PROMPTS)
    lengths, prompts = (config.induction_length, 1024), (n, head_types.PROMPTS)
    causes = differences(audit, lengths, prompts, calibrated=True)
    for size in SIZES:
        if 2 * size > len(audit.by_head["type"]):
            continue
        ours = head_types.composition(audit.by_head, size)
        theirs = audit.printed.head_types.get(size, {})
        for group, kind in itertools.product(("top", "bottom"), KINDS):
            yield row(
                audit,
                "Table 16",
                f"{kind} heads",
                getattr(ours, group)[kind],
                theirs.get(group, {}).get(kind),
                suite="induction",
                cell=f"{group} {size}",
                n=n,
                unit="heads",
                causes=causes,
            )

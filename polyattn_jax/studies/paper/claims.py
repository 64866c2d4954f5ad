"""The paper's claims, and whether they hold on the models of our audits.

A claim holds on a model if its numbers satisfy it, fails if they contradict it, and is undecided
where prompts are too few or softmax does not solve the probe. A recipe collapses where its verdict
is no-go. Over models a claim fails if it fails on one of them, and holds if it holds on all that
were measured, but for that of no single recipe for all models (`no_single_recipe`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools

from lm_jax.statistics import Interval, difference
from polyattn_jax.audit import decision, head_types
from polyattn_jax.audit.results import ConditionResult
from polyattn_jax.recipes.row_maps import RECIPES, SOFTMAX
from polyattn_jax.report import findings, paper
from polyattn_jax.report.beside import Audit
from polyattn_jax.studies.paper.results import ClaimFinding, ClaimResult, ClaimVerdict
from polyattn_jax.suites import named

UNSAFE, DIFFUSE, TOP = 0.7, 0.5, 40
# The unsafe shares of a model over its lengths span 3 to 4 points in the paper, Pythia's 33.
FLAT = 0.1
ABSENT = ClaimFinding("not measured", "–")


def judge(audits: Sequence[Audit]) -> tuple[ClaimResult, ...]:
    """Every claim on every audit."""
    results = []
    for claim in paper.NUMBERS.judged_claim:
        by_model = {audit.name: JUDGES[claim.judge](audit) for audit in audits}
        worst = overall(finding.verdict for finding in by_model.values())
        verdict = JUDGES_OVER_MODELS[claim.over](audits) if claim.over else worst
        results.append(
            ClaimResult(claim.claim, claim.where, claim.paper, claim.evidence, verdict, by_model)
        )
    return tuple(results)


def overall(verdicts: Iterable[ClaimVerdict]) -> ClaimVerdict:
    """The verdict over models: the worst of those that were measured."""
    given = set(verdicts)
    order: tuple[ClaimVerdict, ...] = ("fails", "undecided", "holds")
    return next((verdict for verdict in order if verdict in given), "not measured")


def _recipes(audit: Audit) -> list[ConditionResult]:
    """The recipes of Table 2 in the needle sweep."""
    return [entry for entry in audit.summary.sweep if entry.recipe in RECIPES]


def _collapse(entries: Sequence[ConditionResult]) -> ClaimVerdict:
    """Whether all recipes are shown to lose accuracy."""
    verdicts = {entry.verdict for entry in entries}
    if "preserve" in verdicts:
        return "fails"
    return "undecided" if "undecided" in verdicts else "holds"


def _normalised(audit: Audit) -> list[ConditionResult]:
    return [entry for entry in _recipes(audit) if "_over_" not in entry.recipe]


def no_drop_in(audit: Audit) -> ClaimFinding:
    """Section 5.3 on one model, which supports the claim where every normalised recipe collapses.

    A recipe that preserves here is no contradiction: it may collapse elsewhere.
    """
    entries = _normalised(audit)
    if not entries:
        return ABSENT
    best = findings.best_of(entries)
    text = f"{findings.verdict_counts(entries)}; best {best.recipe}"
    collapsed = {entry.verdict for entry in entries} == {"no-go"}
    return ClaimFinding("holds" if collapsed else "undecided", text)


def no_single_recipe(audits: Sequence[Audit]) -> ClaimVerdict:
    """Section 5.3: none of the ten normalised recipes replaces softmax on all models.

    It fails if one recipe preserves on every model, of two at least, after the correction for all
    recipes that were tried, and holds if each recipe collapses on one of them.
    """
    measured = [audit for audit in audits if _normalised(audit)]
    if not measured:
        return "not measured"
    by_recipe: dict[str, list[str]] = {}
    for entry in itertools.chain(*map(_normalised, measured)):
        by_recipe.setdefault(entry.recipe, []).append(entry.verdict)
    preserved = [
        {each.recipe for each in audit.summary.verdicts if decision.preserves(each)}
        for audit in measured
    ]
    if len(measured) > 1 and set(by_recipe).intersection(*preserved):
        return "fails"
    return "holds" if all("no-go" in own for own in by_recipe.values()) else "undecided"


def un_normalised(audit: Audit) -> ClaimFinding:
    """Section 5.3: the four recipes without a normaliser collapse."""
    entries = [entry for entry in _recipes(audit) if "_over_" in entry.recipe]
    if not entries:
        return ABSENT
    best = findings.best_of(entries)
    return ClaimFinding(_collapse(entries), f"best {findings.counted(best.accuracy)}")


def mostly_unsafe(audit: Audit) -> ClaimFinding:
    """Section 5.2: at least 70 % of active rows are unsafe at p = 2 and b = 0 in every suite."""
    shares = [
        entry.unsafe_active["2"]
        for entry in audit.summary.prevalence
        if entry.bias_kind == "zero"
        and "2" in entry.unsafe_active
        and named.split(entry.suite)[0] in ("induction", "copying", "mqar")
    ]
    if not shares:
        return ABSENT
    verdict = _judged(
        shares,
        fails=any(share.high < UNSAFE for share in shares),
        holds=all(share.low >= UNSAFE for share in shares),
    )
    least, most = (100 * end(share.estimate for share in shares) for end in (min, max))
    return ClaimFinding(verdict, f"{least:.0f} to {most:.0f} % over {len(shares)} suites")


def _judged(shares: Iterable[Interval], *, fails: bool, holds: bool) -> ClaimVerdict:
    """The verdict of what shares contradict or satisfy, if all are over enough prompts."""
    if min(share.n for share in shares) < decision.FEWEST:
        return "undecided"
    return "fails" if fails else "holds" if holds else "undecided"


def _screened(audit: Audit, *, low: bool) -> list[ConditionResult]:
    """The powers whose share of safe rows, no dead one among them, is at most 3 %, or above."""
    by_recipe = {entry.recipe: entry for entry in audit.summary.sweep}
    safe = {entry.recipe: entry.safe for entry in audit.summary.verdicts}
    shares = {entry.recipe: safe.get(entry.recipe) for entry in audit.summary.matched}
    return [
        by_recipe[recipe]
        for recipe, share in shares.items()
        if share is not None and (share.estimate <= decision.SCREEN) == low
    ]


def screen(audit: Audit) -> ClaimFinding:
    """Appendix F (i): recipes with at most 3 % safe rows collapse."""
    entries = _screened(audit, low=True)
    if not entries:
        return ClaimFinding("not measured", "no recipe has so few")
    return ClaimFinding(_collapse(entries), findings.verdict_counts(entries))


def no_promise(audit: Audit) -> ClaimFinding:
    """Appendix F (ii): more safe rows promise nothing, so some such recipe fails."""
    entries = _screened(audit, low=False)
    if not entries:
        return ClaimFinding("not measured", "no recipe has so many")
    verdicts = {entry.verdict for entry in entries}
    verdict: ClaimVerdict = "holds" if "no-go" in verdicts else "undecided"
    return ClaimFinding(
        "fails" if verdicts == {"preserve"} else verdict, findings.verdict_counts(entries)
    )


def sound_bound(audit: Audit) -> ClaimFinding:
    """Appendix P: rows that the bound calls safe are, but for ties."""
    entries = audit.summary.bound
    # A row is judged at every degree.
    judged = sum(entry.n for entry in entries)
    if not judged:
        return ABSENT
    rows = sum({(entry.suite, entry.bias_kind): entry.n for entry in entries}.values())
    degrees = len({entry.p for entry in entries})
    missed, beyond = (
        sum(getattr(entry, name) for entry in entries)
        for name in ("false_negative", "false_negative_eps")
    )
    text = f"{missed:,} of {judged:,} ({rows:,} rows x {degrees} degrees)"
    if missed:
        text += f", {beyond:,} of them no ties" if beyond else ", all ties"
    return ClaimFinding("fails" if beyond else "holds", text)


def few_answers(audit: Audit) -> ClaimFinding:
    """Appendix S: the needle is the best key in 3 to 7 % of rows."""
    shares = [e.answer_is_argmax for e in audit.summary.matched if e.answer_is_argmax]
    if not shares:
        return ABSENT
    share = shares[0]
    text = f"{100 * share.estimate:.1f} [{100 * share.low:.1f}, {100 * share.high:.1f}] %"
    verdict = _judged(
        shares,
        fails=share.high < 0.03 or share.low > 0.07,
        holds=share.low >= 0.03 and share.high <= 0.07,
    )
    return ClaimFinding(verdict, text)


def decisive(audit: Audit) -> ClaimFinding:
    """Section 5.5: the K heads of highest median S_2 do worse than every random set."""
    entries = [entry for entry in audit.summary.decisiveness if entry.size in (20, 40)]
    if not entries:
        return ABSENT
    text = ", ".join(f"{e.beaten} of {len(e.random)} at K = {e.size}" for e in entries)
    text = f"worse than random sets: {text}"
    # Random sets of more than half of the heads share most of them with the top set.
    heads = audit.summary.layers * audit.summary.heads
    large = [entry.size for entry in entries if 2 * entry.size > heads]
    entries = [entry for entry in entries if entry.size not in large]
    if large:
        sizes = " and ".join(map(str, large))
        text += f"; K = {sizes} is more than half of the model's {heads} heads"
    if not entries:
        return ClaimFinding("undecided", f"{text}: not decidable")
    flags = {entry.decisive for entry in entries}
    verdict: ClaimVerdict = "undecided" if None in flags else "holds" if all(flags) else "fails"
    return ClaimFinding(verdict, text)


def _too_few_heads(audit: Audit) -> str:
    """Why the top and the bottom K = 40 cannot be compared; empty where they can."""
    heads = audit.summary.layers * audit.summary.heads
    if heads >= 2 * TOP:
        return ""
    return f"not decidable: of {heads} heads the top and the bottom {TOP} overlap"


def diffuse_top(audit: Audit) -> ClaimFinding:
    """Appendix U: the heads of highest median S_2 are diffuse, those of lowest mostly sinks."""
    if audit.summary.head_types is None:
        return ABSENT
    if few := _too_few_heads(audit):
        return ClaimFinding("undecided", few)
    types = head_types.composition(audit.by_head, TOP)
    top, bottom = types.top["diffuse"], types.bottom["sink"]
    text = f"{top} of the top {TOP} diffuse, {bottom} of the bottom {TOP} sinks"
    both = top > DIFFUSE * TOP and bottom > DIFFUSE * TOP
    return ClaimFinding("holds" if both else "fails", text)


def flat_over_length(audit: Audit) -> ClaimFinding:
    """Appendix C: unsafe rows do not depend on the length, by the intervals of all differences."""
    config, shares = audit.summary.config, {}
    for entry in audit.summary.prevalence:
        length = findings.suite_length(entry.suite, config)
        known = named.split(entry.suite)[0] == "induction" and entry.bias_kind == "zero"
        if known and length and "2" in entry.unsafe_active:
            shares[length] = entry.unsafe_active["2"]
    if len(shares) < 2:
        return ABSENT
    text = ", ".join(f"{100 * shares[n].estimate:.0f} % at {n:,}" for n in sorted(shares))
    changes = [difference(*pair) for pair in itertools.permutations(shares.values(), 2)]
    verdict = _judged(
        shares.values(),
        fails=any(change.low > FLAT for change in changes),
        holds=all(change.high <= FLAT for change in changes),
    )
    return ClaimFinding(verdict, text)


def solved(audit: Audit) -> ClaimFinding:
    """Appendix E: softmax finds the needle; it fails where the whole interval is below one half."""
    base = next(entry for entry in audit.summary.sweep if entry.cell == SOFTMAX.name)
    text = findings.counted(base.accuracy)
    if base.accuracy.high < decision.SOLVED:
        return ClaimFinding("fails", text)
    if audit.summary.controls.unmet:
        return ClaimFinding("undecided", f"{text}; controls not met")
    return ClaimFinding("holds", text)


# The functions that published/polyattn.toml names.
JUDGES: Mapping[str, Callable[[Audit], ClaimFinding]] = {
    each.__name__: each
    for each in (
        *(solved, no_drop_in, un_normalised, mostly_unsafe, screen, no_promise, sound_bound),
        *(few_answers, decisive, diffuse_top, flat_over_length),
    )
}
JUDGES_OVER_MODELS: Mapping[str, Callable[[Sequence[Audit]], ClaimVerdict]] = {
    no_single_recipe.__name__: no_single_recipe
}

"""Sentences and formatted numbers of an intervention, for its page and for the terminal.

Every number is from `summary.json`.
"""

from typing import Literal, cast

from lm_jax.report.markup import number
from protot_jax.studies.interventions.gates import Ranked
from protot_jax.studies.interventions.numbers import ABLATION, LEAST_TEXTS
from protot_jax.studies.interventions.results import (
    ComparedConcept,
    Effect,
    Interval,
    InterventionReport,
    ModeResult,
    OtherPrototype,
    SeedResult,
)
from protot_jax.studies.interventions.sentences import occurrences

Tone = Literal["none", "good", "warn"]

LABELS = {
    "reinitialise": "new vector",
    "mask_write": "write masked",
    "mask_read": "read masked",
    "zero_write": "write zeroed",
    "zero_read": "read zeroed",
}
# Number of words printed before a target.
_CONTEXT = 5


def name(place: SeedResult | OtherPrototype | ComparedConcept | Ranked) -> str:
    """A prototype as the paper writes it: L9 P7."""
    return f"L{place.layer} P{place.prototype}"


def by_mode(seed: SeedResult) -> dict[str, ModeResult]:
    """The results of one model, by intervention."""
    return {one.mode: one for one in seed.modes}


def about(result: InterventionReport) -> str:
    """The concept or the words of the sentences, for a title."""
    settings = result.settings
    return settings.concept or ", ".join(settings.words) or "the sentences"


def conclusion(result: InterventionReport) -> tuple[str, Tone]:
    """The finding in one sentence, and its tone."""
    seed = result.seeds[0]
    one = by_mode(seed)[ABLATION]
    if not seed.kept:
        least = 100.0 * result.settings.least_probability
        return (
            f"No conclusion: under the trained model all {seed.excluded} targets have a "
            f"probability below {least:g} %.",
            "warn",
        )
    effect, control = one.effect, one.control
    text = (
        f"With its write gate zeroed, {name(seed)} changes the geometric mean of the targets' "
        f"probabilities by {percent(effect)} over {cases(effect)}"
    )
    if control is None:
        return f"{text}.", "none"
    text += (
        f"; {control.as_low} of the {control.n} other prototypes have an equal or lower effect "
        f"(p {control.p:.2g}). "
    )
    if seed.specific is None and effect.n >= LEAST_TEXTS:
        return f"{text}Undecided: the interval or p is no number.", "warn"
    if seed.specific is None:
        return f"{text}Undecided: fewer than {LEAST_TEXTS} texts.", "warn"
    if seed.specific:
        return f"{text}The effect is specific.", "good"
    # A verdict implies an interval with both ends.
    includes_0 = cast(float, effect.low) <= 0.0 <= cast(float, effect.high)
    why = "the interval includes 0" if includes_0 else "other prototypes do as much"
    return f"{text}No specific effect: {why}.", "warn"


def replication(result: InterventionReport) -> str:
    """Whether other models have the prototype and its effect; "" without other models."""
    found = result.replication
    if found is None:
        return ""
    values = ", ".join(f"{p:.2g}" for p in found.p_holm)
    text = (
        f"The matching prototype is more alike than different prototypes are in {found.matched} of "
        f"{count(found.models, 'other model')} (p by Holm {values}); in {found.repeated} its "
        "effect is specific too and of the same sign."
    )
    if found.mean is None or found.lowest is None or found.highest is None:
        return text
    return (
        f"{text} Mean effect of all {found.models + 1} models: {signed(found.mean)} %, from "
        f"{signed(found.lowest)} to {signed(found.highest)} %."
    )


def cases(effect: Effect) -> str:
    """Number of sentences that an effect averages, and of their texts where those are fewer."""
    text = count(effect.sentences, "sentence")
    return text if effect.n == effect.sentences else f"{text} of {count(effect.n, 'text')}"


def percent(interval: Interval | None) -> str:
    """A mean change with its interval, if it has one."""
    if interval is None or interval.mean is None:
        return "–"
    return f"{signed(interval.mean)} % {ends(interval)}".rstrip()


def ends(interval: Interval) -> str:
    """An interval in brackets; "" where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{signed(interval.low)}, {signed(interval.high)}]"


def signed(value: float) -> str:
    """A change with two decimals and its sign; one that rounds to zero has no sign."""
    text = number(value, "+.2f")
    return text if text.strip("+−0.") else "0.00"


def count(n: int, thing: str) -> str:
    """A count with its noun, in the plural unless it is 1."""
    return f"{n} {thing}{'s' * (n != 1)}"


def reasons(result: InterventionReport) -> list[str]:
    """Remarks below the conclusion: masking, skipped and excluded sentences, limits."""
    seed = result.seeds[0]
    lines = []
    if seed.kept:
        lines.append(
            "With the write gate masked, so that its share goes to the other prototypes: "
            f"{percent(by_mode(seed)['mask_write'].effect)}."
        )
    if others := result.settings.together:
        lines.append(
            f"{len(others)} concepts were tested at once: the report in the parent folder has p "
            "corrected for their number."
        )
    if skipped := result.skipped:
        lines.append(
            f"{count(len(skipped), 'sentence')} skipped; the first is {skipped[0].where}: "
            f"{skipped[0].reason}."
        )
    if seed.kept and seed.excluded:
        least = 100.0 * result.settings.least_probability
        lines.append(
            f"{count(seed.excluded, 'sentence')} excluded: the target has a probability below "
            f"{least:g} %."
        )
    kept = [one for one in seed.sentences if one.kept]
    if first := sum(one.earlier == 0 for one in kept):
        lines.append(
            f"In {first} of the {len(kept)} kept sentences the target does not occur earlier, so "
            "that a prototype that stores the word itself has nothing of it there."
        )
    if seed.kept and by_mode(seed)[ABLATION].effect.n < LEAST_TEXTS:
        lines.append(
            f"Fewer than {LEAST_TEXTS} texts support no claim about a concept; the controls say "
            "more."
        )
    return lines


def bracketed(text: str, target: str) -> str:
    """The target in brackets with the words before it."""
    last = occurrences(text, target)[-1]
    before = text[: last.start()].split(" ")
    context = " ".join(before[-_CONTEXT - 1 :])
    return f"{'… ' if len(before) > _CONTEXT + 1 else ''}{context}[{last[0]}]"


def model_name(seed: SeedResult, run: str) -> str:
    """A model by its seed, and by its run where it differs from `run`."""
    return f"seed {seed.seed}" if seed.run == run else f"{seed.run}, seed {seed.seed}"

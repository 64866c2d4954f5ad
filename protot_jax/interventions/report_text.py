"""The words of an intervention, for its page and for the terminal.

Every number comes from `intervention.json`.
"""

from typing import Literal, Protocol, cast

from lm_jax.report.markup import number
from protot_jax.interventions.results import (
    Effect,
    Interval,
    InterventionReport,
    ModeResult,
    SeedResult,
)
from protot_jax.interventions.sentences import occurrences
from protot_jax.interventions.summary import ABLATION

Tone = Literal["none", "good", "warn"]

LABELS = {
    "reinitialise": "new vector",
    "mask_write": "write masked",
    "mask_read": "read masked",
    "zero_write": "write zeroed",
    "zero_read": "read zeroed",
}
# Words shown before a target.
_CONTEXT = 5


class Place(Protocol):
    """What has a layer and a prototype."""

    @property
    def layer(self) -> int: ...

    @property
    def prototype(self) -> int: ...


def name(place: Place) -> str:
    """A prototype as the paper writes it: L9 P7."""
    return f"L{place.layer} P{place.prototype}"


def by_mode(seed: SeedResult) -> dict[str, ModeResult]:
    """The results of one model, by intervention."""
    return {one.mode: one for one in seed.modes}


def about(result: InterventionReport) -> str:
    """What the sentences are about, in a title."""
    settings = result.settings
    return settings.concept or ", ".join(settings.words) or "given sentences"


def conclusion(result: InterventionReport) -> tuple[str, Tone]:
    """The finding in one sentence, and its tone."""
    seed = result.seeds[0]
    one = by_mode(seed)[ABLATION]
    if not seed.kept:
        least = 100.0 * result.settings.least_probability
        return (
            f"Nothing can be said: under the trained model all {seed.excluded} targets have a "
            f"probability below {least:g} %.",
            "warn",
        )
    effect, control = one.effect, one.control
    text = (
        f"With its write gate zeroed, {name(seed)} changes the probability of the targets by "
        f"{percent(effect)} on average over {cases(effect)}"
    )
    if control is None:
        return f"{text}.", "none"
    text += (
        f"; of the {control.n} other prototypes {control.as_low} have as low an effect or a "
        f"lower (p {control.p:.2g}). "
    )
    if seed.specific is None:
        return f"{text}One text gives no interval, so it cannot be called specific.", "warn"
    if seed.specific:
        return f"{text}The effect is specific.", "good"
    # With an interval and a verdict, so with both ends.
    ends_hold_0 = cast(float, effect.low) <= 0.0 <= cast(float, effect.high)
    why = "the interval holds 0" if ends_hold_0 else "others do as much"
    return f"{text}No specific effect: {why}.", "warn"


def cases(effect: Effect) -> str:
    """How many sentences an effect is a mean of, and of how many texts where those are fewer."""
    text = count(effect.sentences, "sentence")
    return text if effect.n == effect.sentences else f"{text} of {count(effect.n, 'text')}"


def percent(interval: Interval | None) -> str:
    """A mean change with its interval, if it has one."""
    if interval is None or interval.mean is None:
        return "–"
    return f"{signed(interval.mean)} % {ends(interval)}".rstrip()


def ends(interval: Interval) -> str:
    """An interval in brackets, or nothing where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{signed(interval.low)}, {signed(interval.high)}]"


def signed(value: float) -> str:
    """Two decimals with their sign."""
    return number(value, "+.2f")


def count(n: int, thing: str) -> str:
    """A number of things."""
    return f"{n} {thing}{'s' * (n != 1)}"


def reasons(result: InterventionReport) -> list[str]:
    """What stands below the answer: what was left out, and how far it carries."""
    seed = result.seeds[0]
    lines = []
    if seed.kept:
        lines.append(
            "With the gate masked, so that its share goes to the others: "
            f"{percent(by_mode(seed)['mask_write'].effect)}."
        )
    if others := result.settings.together:
        lines.append(
            f"{len(others)} concepts were tested at once: comparison.html in the folder above has "
            "p corrected for that."
        )
    if skipped := result.skipped:
        lines.append(
            f"{count(len(skipped), 'sentence')} left out, the first because "
            f"{skipped[0].where}: {skipped[0].reason}."
        )
    if seed.kept and seed.excluded:
        least = 100.0 * result.settings.least_probability
        lines.append(f"{count(seed.excluded, 'sentence')} excluded, below {least:g} %.")
    kept = [one for one in seed.sentences if one.kept]
    if first := sum(one.earlier == 0 for one in kept):
        lines.append(
            f"In {first} of the {len(kept)} the target does not occur before: a prototype that "
            "takes the word itself holds nothing of it there."
        )
    if seed.kept and by_mode(seed)[ABLATION].effect.n < 10:
        lines.append("So few texts support no claim about a concept; the controls say more.")
    return lines


def context(text: str, target: str) -> str:
    """The target in brackets with the words before it."""
    last = occurrences(text, target)[-1]
    before = text[: last.start()].split(" ")
    shown = " ".join(before[-_CONTEXT - 1 :])
    return f"{'… ' if len(before) > _CONTEXT + 1 else ''}{shown}[{last[0]}]"


def model_name(seed: SeedResult, run: str) -> str:
    """A model by its seed, and by its run where that is another one."""
    return f"seed {seed.seed}" if seed.run == run else f"{seed.run}, seed {seed.seed}"

"""Statistics of prototypes: routing by layer, half-lives, reading before writing, judged themes."""

from collections.abc import Mapping
import json
import math
from typing import Any

from lm_jax.statistics import student_interval
from tools.page_blocks.sources import BRACKETS, ROOT, interval, summary, table

_VERDICTS = {True: "yes", False: "no", None: "undecided"}


def routing(name: str) -> str:
    """Write gates by layer: their entropy as a share of the largest, their maximum, dead ones."""
    found = summary(name)
    largest = math.log(found["model"]["prototypes"])
    rows = [
        (
            str(each["layer"]),
            f"{each['write']['entropy'] / largest:.3f}",
            f"{each['write']['top_1']:.3f}",
            f"{each['write']['mutual_information']:.2f}",
            f"{each['write']['mutual_information_by_chance']:.2f}",
            str(each["write"]["dead"]),
        )
        for each in found["layers"]
    ]
    heads = ("layer", "entropy over its maximum", "largest gate", "nats of the token", "by chance")
    return table((*heads, "dead"), rows)


def findings(name: str) -> str:
    """Reading before writing, half-life and repetition, and the scores of the judge, one a line."""
    found = summary(name)
    lag, life = found["lag"], found["half_life_repetition"]
    lines = [
        "- Correlation of read with write gates one token before writing, less that at writing: "
        f"{interval(lag['lead'], '+.3f')}; less that of other prototypes, too: "
        f"{interval(lag['own_lead'], '+.3f')}. Of {lag['lead']['prototypes']} prototypes "
        f"{lag['peaks_one_before']:.0%} have their highest there.",
        f"- Half-life and repetition of tokens, within layers: Spearman "
        f"{interval(life['spearman'], '.3f')}, p {life['spearman']['p']:.3f}; over all "
        f"{life['spearman']['prototypes']} prototypes {life['overall_spearman']:.3f}.",
        f"- Disentanglement by the judge, 1 to 10: {judged(name, 'disentanglement')}.",
    ]
    return "\n".join(lines) + "\n"


def judged(name: str, score: str, form: str = "{} ({} to {})") -> str:
    """Mean score of prototypes and of random texts, with Student's 95 % intervals.

    The answers are in the file that the command of the result names.
    """
    settings = summary(name)["settings"]
    answers = ROOT / "docs/data" / settings["judge"].removeprefix("cached:")
    found: dict[bool, list[float]] = {False: [], True: []}
    for line in answers.read_text("utf-8").splitlines():
        entry = json.loads(line)
        is_random = entry["unit"].startswith("random texts")
        found[is_random].append(json.loads(entry["answer"])[score])
    parts = []
    for is_random, noun in ((False, "prototypes"), (True, "random texts")):
        mean = student_interval(found[is_random])
        value = interval(vars(mean), ".2f", form=form)
        parts.append(f"{value} (n = {mean.n}) of {noun}")
    return " and ".join(parts)


def lead(name: str) -> str:
    """Lead of reading over writing, with that over other prototypes."""
    found = summary(name)["lag"]
    return (
        f"correlation at one token before less that at the same token "
        f"{interval(found['lead'], '.3f', form=BRACKETS)}, over other prototypes "
        f"{interval(found['own_lead'], '.3f', form=BRACKETS)}; "
        f"{found['peaks_one_before']:.0%} peak there; "
        f"n = {found['lead']['texts']:,} texts, {found['lead']['prototypes']} prototypes"
    )


def half_life(name: str) -> str:
    """Correlation of half-life and repetition, over all prototypes and within layers."""
    found = summary(name)["half_life_repetition"]
    return (
        f"all prototypes {found['overall_spearman']:.3f}, within layers "
        f"{interval(found['spearman'], '.3f', form=BRACKETS)}, p {found['spearman']['p']:.3f}; "
        f"n = {found['spearman']['prototypes']} prototypes"
    )


def entropies(name: str) -> str:
    """Entropy of the write gates over its maximum, by layer."""
    found = summary(name)
    largest = math.log(found["model"]["prototypes"])
    return ", ".join(f"{each['write']['entropy'] / largest:.3f}" for each in found["layers"])


def interventions(name: str) -> str:
    """Effect of a closed write gate on the targets of each concept, and its p among prototypes."""
    rows = []
    for each in summary(name)["concepts"]:
        effect, p, corrected = each["effect"], each["p"], each["p_holm"]
        rows.append(
            (
                each["concept"],
                f"L{each['layer']} P{each['prototype']}",
                f"{effect['n']}",
                effect_of(each, "{} ({} to {})"),
                "" if p is None else f"{p:.3f}",
                "" if corrected is None else f"{corrected:.3f}",
                _VERDICTS[each["specific"]],
            )
        )
    heads = ("concept", "prototype", "texts", "change of the target, %", "p among prototypes")
    return table((*heads, "p, Holm", "specific"), rows)


def effect_of(concept: Mapping[str, Any], form: str = BRACKETS) -> str:
    """The change of the targets' probability in percent, with its interval where it has one."""
    effect = concept["effect"]
    if effect["mean"] is None:
        return "no target of 1 %"
    if effect["low"] is None:
        return f"{effect['mean']:+.1f}"
    return form.format(*(f"{effect[key]:+.1f}" for key in ("mean", "low", "high")))


def concept_effect(name: str, concept: str) -> str:
    """The effect on one concept, with its p and the number of texts."""
    (found,) = (each for each in summary(name)["concepts"] if each["concept"] == concept)
    p = "" if found["p"] is None else f", p {found['p']:.3f} among prototypes"
    return f"{effect_of(found)} %{p}; n = {found['effect']['n']} texts"

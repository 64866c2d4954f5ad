"""Sentences in pairs of opposite meaning: gender, negation, number.

Prototype Transformer, section 5.2, Table 5: unlike noise, these flips should change what comes
next. The paper's set has a tag such as "[gender: male]" after a sentence, which few texts have; so
each flip is given in plain English as well. All sentences are built from these frames and lists,
which were written for this project. Fillings of one frame are much alike, so that a slice has
several frames, in equal parts, and its intervals are over frames (`summary.interval`).
"""

from collections.abc import Mapping
import itertools
import string
from typing import NamedTuple

import numpy as np

_WORDS: Mapping[str, tuple[str, ...]] = {
    "person": (
        *("doctor", "teacher", "president", "farmer", "soldier", "writer", "judge", "manager"),
        *("student", "neighbor", "lawyer", "singer", "driver", "painter", "guest", "cook"),
    ),
    "place": (
        *("the house", "the city", "the school", "the river", "the office", "the market"),
        *("the church", "the station", "the village", "the hospital", "the garden", "the farm"),
    ),
    "went": ("went to", "came from", "worked near", "lived near", "walked past", "thought of"),
    "time": (
        *("In the spring", "Last year", "After the war", "That evening", "In the end"),
        *("Before noon", "For many years", "At that time"),
    ),
    "thing": ("dog", "boy", "girl", "book", "tree", "car", "player", "worker", "bird", "ship"),
    "object": (
        *("door", "road", "plan", "answer", "law", "town", "bridge", "story", "house", "report"),
        *("question", "child", "offer", "letter"),
    ),
    "state": ("open", "safe", "ready", "happy", "possible", "true", "new", "important", "known"),
    "joined": ("because", "so", "and", "but"),
    "done": ("built", "sold", "changed", "moved", "found", "used", "closed", "painted"),
}


class Frame(NamedTuple):
    """A sentence with blanks, of which `{flip}` takes either form.

    Attributes:
      text: the sentence; every other blank is a name of the lists.
      first, second: the two forms; a form may have blanks too.
      neutral: the form beside a tag; None where that is `first`, as in all frames of negation and
        number, so that a tag of the second form contradicts its sentence: "The law is safe, so
        [negation: negative]". Only frames of gender have sentences that fit both tags.
    """

    text: str
    first: str
    second: str
    neutral: str | None = None


class Flip(NamedTuple):
    """A pair of opposite meaning, and the frame that it fills."""

    frame: str
    text: str
    perturbed: str


_GENDER = (
    Frame("The {person} {went} {place}, and {flip}", "he", "she", ""),
    Frame("{time}, {flip} {went} {place} and the", "he", "she", "someone"),
    Frame("{flip} was born near {place} and became a {person} in", "He", "She", "The child"),
    Frame("The {person} said that {flip} often {went} {place} with", "he", "she", "people"),
    Frame("A young {flip} {went} {place}, where the {person}", "man", "woman", "person"),
    Frame("{time}, the {person} met a {flip} near {place} who", "boy", "girl", "child"),
    Frame("The {person} and a {flip} {went} {place}, but", "nephew", "niece", "friend"),
    Frame("{flip} told the {person} about {place}, so", "My father", "My mother", "My parent"),
    Frame("Everyone near {place} knew that the {person} lost {flip}", "his", "her", "the"),
    Frame("The {flip} of the {person} {went} {place} and", "brother", "sister", "relative"),
    Frame("{time}, the {person} asked {flip} about {place}, and", "him", "her", "them"),
    Frame("There was a {person} at {place} who hurt {flip}", "himself", "herself", ""),
)
_NEGATION = (
    Frame("The {object} is{flip} {state}, {joined}", "", " not"),
    Frame("{time}, the {object} was{flip} {state} to the {person}, {joined}", "", " not"),
    Frame("We know that the {object} will{flip} be {state}, {joined}", "", " not"),
    Frame("The {person} has{flip} {done} the {object}, {joined}", "", " not"),
    Frame("They have{flip} {done} the {object} near {place}, {joined}", "", " not"),
    Frame("The {object} was{flip} {done} by the {person}, {joined}", "", " not"),
    Frame("It is{flip} {state} that the {object} was {done}, {joined}", "", " not"),
    Frame("The {object} near {place} can{flip} be {done}, {joined}", "", " not"),
    Frame("The {person} would{flip} call the {object} {state}, {joined}", "", " not"),
    Frame("{time}, it was{flip} the {object} that the {person} {done}, {joined}", "", " not"),
    Frame("You should{flip} think that the {object} is {state}, {joined}", "", " not"),
    Frame("The {person} had{flip} {done} the {object} before, {joined}", "", " not"),
)
_NUMBER = (
    Frame("In {place}, near the {object}, the {flip}", "{thing}", "{thing}s"),
    Frame("{time}, the {person} {done} the {flip}", "{thing}", "{thing}s"),
    Frame("The {flip} of the {person} in {place} and", "{thing}", "{thing}s"),
    Frame("{time}, the {flip} near {place}", "{thing}", "{thing}s"),
    Frame("The {person} wrote about the {flip} that", "{thing}", "{thing}s"),
    Frame("What the {person} liked about {place} was the {flip}", "{thing}", "{thing}s"),
    Frame("From {place} one could see the {flip}, which", "{thing}", "{thing}s"),
    Frame("The {person} {went} {place} with the {flip} and", "{thing}", "{thing}s"),
    Frame("The {state} {flip} near {place}", "{thing}", "{thing}s"),
    Frame("Nobody told the {person} where the {flip}", "{thing}", "{thing}s"),
    Frame("{time}, behind {place}, we found the {flip} that", "{thing}", "{thing}s"),
    Frame("The {person} asked whose {flip}", "{thing}", "{thing}s"),
)
_FRAMES: Mapping[str, tuple[tuple[Frame, ...], tuple[str, str]]] = {
    "gender": (_GENDER, ("male", "female")),
    "negation": (_NEGATION, ("affirmative", "negative")),
    "number": (_NUMBER, ("singular", "plural")),
}
SLICES = (*_FRAMES, *(f"{name}_tag" for name in _FRAMES))


def flips(name: str, count: int, seed: int) -> list[Flip]:
    """Up to `count` pairs of a slice of `SLICES`, each once, in turn of each of its frames."""
    kind = name.removesuffix("_tag")
    frames, tags = _FRAMES[kind]
    rng = np.random.default_rng(seed)
    made = [_filled(frame, tags if name != kind else None, kind, rng) for frame in frames]
    turns = itertools.zip_longest(*made)
    return [flip for flip in itertools.chain(*turns) if flip is not None][:count]


def _filled(
    frame: Frame, tags: tuple[str, str] | None, kind: str, rng: np.random.Generator
) -> list[Flip]:
    """All fillings of a frame in random order, with tags at their end if any are given."""
    label = frame.text.replace("{flip}", f"{{{frame.first}|{frame.second}}}")
    blanks = {
        blank: _WORDS[blank]
        for text in (frame.text, frame.first)
        for _, blank, _, _ in string.Formatter().parse(text)
        if blank and blank != "flip"
    }
    fillings = list(itertools.product(*blanks.values()))
    result = []
    for i in rng.permutation(len(fillings)):
        words = dict(zip(blanks, fillings[i], strict=True))

        def written(form: str, words: dict[str, str] = words) -> str:
            return frame.text.format(flip=form.format(**words), **words)

        if tags is None:
            result.append(Flip(label, written(frame.first), written(frame.second)))
            continue
        text = written(frame.first if frame.neutral is None else frame.neutral).rstrip()
        result.append(Flip(label, *(f"{text} [{kind}: {tag}]" for tag in tags)))
    return result

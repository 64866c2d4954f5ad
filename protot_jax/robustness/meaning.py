"""Sentences in pairs of opposite meaning: gender, negation, number.

Prototype Transformer, section 5.2, Table 5: unlike noise, these flips should change what comes
next. The paper's set has a tag such as "[gender: male]" after a sentence, which few texts have; so
each flip is given in plain English as well. All sentences are built from these lists, which were
written for this project.
"""

import itertools

import numpy as np

_PEOPLE = (
    *("doctor", "teacher", "president", "farmer", "soldier", "writer", "judge", "engineer"),
    *("student", "neighbor", "lawyer", "singer", "driver", "artist", "guest", "cook"),
)
_PLACES = (
    *("the house", "the city", "the school", "the river", "the office", "the market", "the farm"),
    *("the church", "the station", "the village", "the hospital", "the garden"),
)
_WENT = ("went to", "came from", "worked in", "lived near", "walked past", "thought of", "left")
_THINGS = ("dog", "boy", "girl", "book", "tree", "car", "player", "worker", "nation", "bird")
_STATES = ("open", "safe", "ready", "happy", "possible", "true", "new", "important", "known")
_OBJECTS = (
    *("door", "road", "plan", "answer", "law", "town", "bridge", "story", "house", "report"),
    *("question", "child", "offer", "letter"),
)
_JOINED = ("because", "so", "and", "but")


def _gender() -> list[tuple[str, str, str]]:
    return [
        (f"The {person} {went} {place}, and {{}}", "he", "she")
        for person, went, place in itertools.product(_PEOPLE, _WENT, _PLACES)
    ]


def _negation() -> list[tuple[str, str, str]]:
    return [
        (f"The {thing} is{{}} {state}, {joined}", "", " not")
        for thing, state, joined in itertools.product(_OBJECTS, _STATES, _JOINED)
    ]


def _number() -> list[tuple[str, str, str]]:
    return [
        (f"In {place}, near {other}, the {{}}", thing, f"{thing}s")
        for thing, place, other in itertools.product(_THINGS, _PLACES, _PLACES)
        if place != other
    ]


_FRAMES = {
    "gender": (_gender, ("male", "female")),
    "negation": (_negation, ("affirmative", "negative")),
    "number": (_number, ("singular", "plural")),
}
SLICES = (*_FRAMES, *(f"{name}_tag" for name in _FRAMES))


def flips(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Up to `count` pairs of a slice of `SLICES`, drawn without repetition."""
    frames, tags = _FRAMES[name.removesuffix("_tag")]
    made = frames()
    rng = np.random.default_rng(seed)
    chosen = [made[i] for i in rng.permutation(len(made))[:count]]
    if not name.endswith("_tag"):
        return [(text.format(first), text.format(second)) for text, first, second in chosen]
    kind = name.removesuffix("_tag")
    # The pronoun would contradict one of the tags.
    texts = [text.format("" if kind == "gender" else first).rstrip() for text, first, _ in chosen]
    return [(f"{text} [{kind}: {tags[0]}]", f"{text} [{kind}: {tags[1]}]") for text in texts]

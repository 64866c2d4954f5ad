"""Built sentences for slices that have too few places in a corpus (appendix A.5.1).

The paper fills its slices from pools of sentences; these are built from lists that were written for
this project. Each sentence has one place for its slice.
"""

from collections.abc import Iterator
import itertools

import numpy as np

from protot_jax.studies.robustness import lists

_TIMES = ("before noon", "last winter", "after the storm", "in the spring", "on that evening")
_NAMES = (
    *("Harper", "Bennett", "Collins", "Dalton", "Foster", "Graham", "Hughes", "Lawson", "Mercer"),
    *("Nolan", "Parker", "Quinn", "Reed", "Sutton", "Turner", "Walsh"),
)
_DID = ("spoke to the crowd", "opened the meeting", "wrote a short letter", "left the town")
# Abbreviated before other names.
_OF_PLACES = ("Saint", "Mount")
_WHO = ("We", "They", "You", "The farmers", "My neighbors", "Both sisters")
_AUXILIARIES = (
    *("do not", "did not", "cannot", "could not", "will not", "would not", "should not"),
    "must not",
)
_VERBS = ("need more time", "see the road", "open the gate", "answer the question", "sell the boat")
_SPELLED = (
    *("airplane", "armor", "catalog", "center", "color", "flavor", "harbor", "jewelry", "mustache"),
    *("neighbor", "odor", "parlor", "plow", "program", "rumor", "theater", "tumor", "vapor"),
)
_MATTERED = (
    *("was mentioned twice", "surprised the child", "worried her mother", "seemed quite strange"),
    *("was described at length", "pleased the guests"),
)
_COUNTED = (
    *("bridge", "city", "doctor", "family", "farmer", "garden", "kitchen", "letter", "lesson"),
    *("mountain", "river", "song", "teacher", "village", "window"),
)
_SEEN = (
    "He remembered the",
    "She asked about the",
    "They painted the",
    "We liked the",
    "I saw the",
)
_PLACES = ("near the coast", "beyond the hills", "in the north", "beside the road")


def _abbreviation() -> Iterator[str]:
    titles = [
        title for long, _ in lists.abbreviations() if (title := long.removesuffix(" *")) != long
    ]
    for title, name, did, time in itertools.product(titles, _NAMES, _DID, _TIMES):
        if title not in _OF_PLACES:
            yield f"{title} {name} {did} {time}."


def _contraction() -> Iterator[str]:
    for who, auxiliary, verb, time in itertools.product(_WHO, _AUXILIARIES, _VERBS, _TIMES):
        yield f"{who} {auxiliary} {verb} {time}."


def _spelling() -> Iterator[str]:
    british = lists.spelling()
    for word, mattered, time in itertools.product(_SPELLED, _MATTERED, _TIMES):
        for spelled in (word, british[word]):
            yield f"The {spelled} {mattered} {time}."


def _morphology() -> Iterator[str]:
    for seen, noun, place, time in itertools.product(_SEEN, _COUNTED, _PLACES, _TIMES):
        yield f"{seen} {noun} {place} {time}."


_BUILT = {
    "abbreviation": _abbreviation,
    "contraction": _contraction,
    "morphology": _morphology,
    "spelling": _spelling,
}


# The one sentence of each slice whose blanks are filled, as a pair of the benchmark names it.
FRAMES = {
    "abbreviation": "{title} {name} {did} {time}.",
    "contraction": "{who} {auxiliary} {verb} {time}.",
    "morphology": "{seen} {noun} {place} {time}.",
    "spelling": "The {spelled} {mattered} {time}.",
}


def sentences(name: str, seed: int) -> list[str]:
    """The built sentences of a slice in random order; none for one that every corpus fills."""
    built = list(_BUILT[name]()) if name in _BUILT else []
    return [built[i] for i in np.random.default_rng(seed).permutation(len(built))]

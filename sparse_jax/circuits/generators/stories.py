"""Tasks that a small model of children's stories solves, such as stories15M, in our own words.

Each has two sets of wordings, the second under the name with `_rephrased`. The corrupt prompt is
the clean one with words exchanged, so that its right continuation is the wrong one of the clean
prompt, and both prompts have as many words:

- giving: who is given something. The names of the giver and of the other one are exchanged.
- thanks: who speaks to the one that is addressed. The two names are exchanged.
- pronoun, possessive, reflexive: she or he, her or his, herself or himself. The name, and "girl" or
  "boy", are of the other gender. No name begins the prompt, where a tokenizer may divide it.
- thing: the thing that was named before. Another thing is named.
- number: was or were. The noun is one or many.
- count: one or many, after a number. The number is "one" or another.
- feeling: happy or sad, of something that was found or lost.
"""

from collections.abc import Callable, Mapping, Sequence
import functools

import numpy as np

from sparse_jax.circuits.generators.examples import Example, words

Draw = Callable[[np.random.Generator], Example]
_Wordings = Mapping[str, str]
_Draw = Callable[[np.random.Generator, _Wordings], Example]

_GIVING = {
    "friends": (
        "{a} and {b} were best friends. One day, they went to the {spot}. {s} had a {toy} in a "
        "bag. {s} gave the {toy} to"
    ),
    "sharing": (
        "Once upon a time, there were two friends, {a} and {b}. They liked to play at the {spot}. "
        "One day, {s} found a {toy}. {s} wanted to share, so {s} gave the {toy} to"
    ),
}
_GIVING_REPHRASED = {
    "showing": (
        "One sunny day, {a} and {b} played at the {spot}. {s} saw a big {toy} and picked it up. "
        "{s} showed the {toy} to"
    ),
    "handing": "{a} went to the {spot} with {b}. {s} had a new {toy}. {s} handed the {toy} to",
}
_THANKS = {
    "gift": '{a} and {b} were best friends. One day, {s} gave {o} a {toy}. "Thank you, {s}!" said',
    "find": (
        "Once upon a time, {a} and {b} went to the {spot}. {s} found a {toy} for {o}. "
        '"Thank you, {s}," said'
    ),
}
_THANKS_REPHRASED = {
    "question": (
        '{a} and {b} played at the {spot}. "Do you want to see my {toy}, {o}?" asked {s}. '
        '"Yes, {s}!" said'
    ),
    "look": 'One day, {a} and {b} were at the {spot}. "Look, {s}, a {toy}!" said',
}
_PRONOUN = {
    "play": (
        "Once upon a time, there was a little {child} named {name}. {name} had a {toy} and loved "
        "to play at the {spot}. One day,"
    ),
    "see": "One day, a {child} named {name} went to the {spot}. {name} saw a {toy} there, and",
}
_PRONOUN_REPHRASED = {
    "search": "One morning, {name} went to the {spot} to find a {toy}. When",
    "wish": "One morning, {name} was at the {spot}. {name} wanted a {toy}, but",
}
_POSSESSIVE = {
    "loss": (
        "Once upon a time, there was a little {child} named {name}. {name} took a {toy} to the "
        "{spot}. There, {name} lost"
    ),
    "company": "One day, a {child} named {name} took a {toy} and went to the {spot} with",
}
_POSSESSIVE_REPHRASED = {
    "home": (
        "One morning, {name} found a {toy} at the {spot}. {name} took the {toy} home and showed "
        "it to"
    ),
    "plan": "One morning, {name} was at the {spot}. {name} wanted to show the {toy} to",
}
_REFLEXIVE = {
    "alone": "One day, {name} went to the {spot} to play with a {toy} all by",
    "keeping": (
        "A {child} named {name} went to the {spot}. {name} had a {toy} and did not want to share. "
        "{name} wanted to keep it all for"
    ),
}
_REFLEXIVE_REPHRASED = {
    "proud": "One morning, {name} was at the {spot} with a {toy}. {name} was very proud of",
    "made": "A little {child}, {name}, made a {toy} at the {spot} without help, all by",
}
_THING = {
    "home": (
        "Once upon a time, {a} found a {toy} at the {spot}. {a} was very happy. {a} went home and "
        "showed {b} the"
    ),
    "search": "One day, {a} lost a {toy}. {b} went to the {spot} and looked for the",
}
_THING_REPHRASED = {
    "look": '{a} and {b} saw a {toy} at the {spot}. "Look, a',
    "wish": "{a} wanted a {toy}. {a} went to the {spot} with {b}. There, {a} saw a big",
}
_NUMBER = {
    "meeting": "One day, {name} met the {noun} at the {spot}. The {noun}",
    "sight": "{name} went to the {spot} and saw the {noun}. The little {noun}",
}
_NUMBER_REPHRASED = {
    "near": "{name} saw the {noun} near the {spot}. The {noun}",
    "there": "One day, {name} went to the {spot}. The {noun} at the {spot}",
}
_COUNT = {
    "liking": "{name} liked the {noun}. At the {spot}, {name} saw {number} little",
    "wanting": "{name} wanted to see {noun}. {name} went to the {spot} and saw {number} big",
}
_COUNT_REPHRASED = {
    "meeting": "One day, {name} went to the {spot}. There {name} met {number} little",
    "story": 'Mom told {name} a story about the {spot}. "There lived {number} little',
}
_FEELING = {
    "day": "One day, {name} {did} a {toy} at the {spot}. {name} was very",
    "short": "{name} went to the {spot} and {did} the {toy}. {name} felt very",
}
_FEELING_REPHRASED = {
    "when": "When {name} {did} the {toy} at the {spot}, {name} was very",
    "speech": '{name} {did} a {toy} at the {spot}. "I am so',
}


def _filled(
    rng: np.random.Generator,
    wordings: _Wordings,
    fields: Mapping[str, str],
    exchanged: Mapping[str, str],
    right: str,
    wrong: str,
) -> Example:
    """A wording with its fields, and with some of them exchanged."""
    (name,) = _some(rng, list(wordings), 1)
    fields = {"spot": _one(rng, "spots"), "toy": _one(rng, "toys"), **fields}
    clean, corrupt = (wordings[name].format(**each) for each in (fields, {**fields, **exchanged}))
    return Example(clean, corrupt, (f" {right}",), (f" {wrong}",), name)


def _some(rng: np.random.Generator, choices: Sequence[str], count: int) -> list[str]:
    """So many different ones in random order."""
    return [str(each) for each in rng.choice(choices, count, replace=False)]


def _one(rng: np.random.Generator, *kinds: str) -> str:
    """A word of some lists."""
    return _some(rng, [word for kind in kinds for word in words(kind)], 1)[0]


def _people(rng: np.random.Generator) -> list[str]:
    return _some(rng, [*words("girls"), *words("boys")], 2)


def _giving(rng: np.random.Generator, wordings: _Wordings) -> Example:
    """The name that is not the giver's."""
    subject, other = _people(rng)
    a, b = _some(rng, [subject, other], 2)
    fields = {"a": a, "b": b, "s": subject, "o": other}
    return _filled(rng, wordings, fields, {"s": other, "o": subject}, other, subject)


def _gender(rng: np.random.Generator, wordings: _Wordings, *, pair: tuple[str, str]) -> Example:
    """The word for a girl or that for a boy."""
    kinds = [
        ({"name": _one(rng, names), "child": child}, word)
        for names, child, word in zip(("girls", "boys"), ("girl", "boy"), pair, strict=True)
    ]
    (fields, right), (exchanged, wrong) = kinds if rng.random() < 0.5 else kinds[::-1]
    return _filled(rng, wordings, fields, exchanged, right, wrong)


def _thing(rng: np.random.Generator, wordings: _Wordings) -> Example:
    """The thing that is named in the prompt, rather than one that is not."""
    (a, b), (toy, other) = _people(rng), _some(rng, words("toys"), 2)
    return _filled(rng, wordings, {"a": a, "b": b, "toy": toy}, {"toy": other}, toy, other)


def _noun(rng: np.random.Generator) -> tuple[tuple[str, str], bool]:
    """A noun as one and as many, and which of them is right."""
    nouns = words("plurals")
    i = 2 * int(rng.integers(len(nouns) // 2))
    return (nouns[i], nouns[i + 1]), bool(rng.random() < 0.5)


def _number(rng: np.random.Generator, wordings: _Wordings) -> Example:
    """The verb that agrees with the noun."""
    noun, many = _noun(rng)
    fields = {"name": _one(rng, "girls", "boys"), "noun": noun[many]}
    verbs = "was", "were"
    return _filled(rng, wordings, fields, {"noun": noun[not many]}, verbs[many], verbs[not many])


def _count(rng: np.random.Generator, wordings: _Wordings) -> Example:
    """The noun as one or as many, whichever was named before."""
    noun, many = _noun(rng)
    number = "one", _one(rng, "numbers")
    fields = {
        "name": _one(rng, "girls", "boys"),
        "noun": noun[int(rng.integers(2))],
        "number": number[many],
    }
    other = {"number": number[not many]}
    return _filled(rng, wordings, fields, other, noun[many], noun[not many])


def _feeling(rng: np.random.Generator, wordings: _Wordings) -> Example:
    """Happy about what was found, sad about what was lost."""
    kinds = [("found", "happy"), ("lost", "sad")]
    (did, right), (other, wrong) = kinds if rng.random() < 0.5 else kinds[::-1]
    fields = {"name": _one(rng, "girls", "boys"), "did": did}
    return _filled(rng, wordings, fields, {"did": other}, right, wrong)


def _draw(draw: _Draw, wordings: _Wordings, rng: np.random.Generator) -> Example:
    return draw(rng, wordings)


_TASKS: Mapping[str, tuple[_Draw, _Wordings, _Wordings]] = {
    "giving": (_giving, _GIVING, _GIVING_REPHRASED),
    "thanks": (_giving, _THANKS, _THANKS_REPHRASED),
    "pronoun": (functools.partial(_gender, pair=("she", "he")), _PRONOUN, _PRONOUN_REPHRASED),
    "possessive": (
        functools.partial(_gender, pair=("her", "his")),
        _POSSESSIVE,
        _POSSESSIVE_REPHRASED,
    ),
    "reflexive": (
        functools.partial(_gender, pair=("herself", "himself")),
        _REFLEXIVE,
        _REFLEXIVE_REPHRASED,
    ),
    "thing": (_thing, _THING, _THING_REPHRASED),
    "number": (_number, _NUMBER, _NUMBER_REPHRASED),
    "count": (_count, _COUNT, _COUNT_REPHRASED),
    "feeling": (_feeling, _FEELING, _FEELING_REPHRASED),
}
# The other wording of each task.
REPHRASED: Mapping[str, str] = {f"story_{name}": f"story_{name}_rephrased" for name in _TASKS}
DRAWS: Mapping[str, Draw] = {
    f"story_{name}{suffix}": functools.partial(_draw, draw, wordings)
    for name, (draw, *both) in _TASKS.items()
    for suffix, wordings in zip(("", "_rephrased"), both, strict=True)
}
WORDINGS: tuple[_Wordings, ...] = tuple(each for _, *both in _TASKS.values() for each in both)

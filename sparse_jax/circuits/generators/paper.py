"""Examples of the paper's tasks: copy, IOI, greater-than, docstring (section 4.2, appendix E).

What the paper leaves open, and what is done here:

- copy: the corrupt prompt is the clean one with another last letter in the first copy, so the right
  continuation changes and nothing else does. The number of letters differs between prompts, and so
  does the distance to the letter that is to be copied: no head can find it by position alone.
- IOI: the corrupt prompt has three other names (ABC, Wang et al. 2023), or with `flip` the clean
  one with the second subject replaced by the indirect object (`s2_io_flip` of MIB).
- docstring: "docstring" ends both prompts with `:param`; "docstring_printed" drops the colon of the
  last `param` in the corrupt prompt, as printed in appendix E.3.
"""

from collections.abc import Mapping
import string

import numpy as np

from sparse_jax.circuits.generators.examples import Example, words

IOI = {
    "park": "Then, {b} and {a} went to the {place}. {s} gave a {thing} to",
    "cafe": "When {b} and {a} got a snack at the {place}, {s} decided to give the {thing} to",
    "lunch": "After the lunch, {b} and {a} went to the {place}. {s} gave a {thing} to",
}
IOI_REPHRASED = {
    "friends": "The friends {b} and {a} met at the {place}. Soon {s} handed the {thing} to",
    "working": "While {b} and {a} were working at the {place}, {s} passed a {thing} to",
}
# In our own words, so that their circuits are not compared with those of the paper's long prompts.
IOI_LONG = {
    "months": (
        "After many months in which they could not meet, because one was abroad and the other ill, "
        "{b} and {a} at last spent a whole afternoon at the {place}, where they talked about what "
        "had happened since and laughed about old stories. Before it got dark, {s} gave a {thing} "
        "to"
    ),
    "argument": (
        "Although {b} and {a} had quarrelled for years about a matter that nobody else remembered, "
        "they agreed to meet at the {place} and to speak openly. When everything had been said, "
        "{s} gave a {thing} to"
    ),
}
YEARS = {
    "lasted": "The {noun} lasted from the year {start} to {century}",
    "began": "The {noun} began in {start} and ended in {century}",
}


def copy(
    rng: np.random.Generator, *, letters: tuple[int, int] = (10, 18), separator: str = " "
) -> Example:
    """Random letters, a comma, and the letters again but for the last one (Fig. 3).

    Args:
      rng: the generator; it draws the number of letters, uniformly, and the letters, none of them
        twice.
      letters: least and largest length of the sequence; the paper's has 18.
      separator: text between letters; "" writes them as the paper does, which most tokenizers
        merge.
    """
    count = int(rng.integers(*letters, endpoint=True))
    *body, right, wrong = rng.choice(list(string.ascii_uppercase), count + 1, replace=False)
    second = separator.join(body)
    clean, corrupt = (f"{separator.join([*body, last])}, {second}" for last in (right, wrong))
    return Example(clean, corrupt, (f"{separator}{right}",), (f"{separator}{wrong}",), "copy")


def ioi(
    rng: np.random.Generator, *, templates: Mapping[str, str] = IOI, flip: bool = False
) -> Example:
    """Indirect object identification: the name that does not come a second time (E.2).

    Args:
      rng: generator that draws names, places and objects, the order of the names and the template.
      templates: wordings by name.
      flip: whether the corrupt prompt has the indirect object for the second subject; else all
        three names are others.
    """
    name = str(rng.choice(list(templates)))
    subject, indirect, *others = map(str, rng.choice(words("names"), 5, replace=False))
    fields = {"place": rng.choice(words("places")), "thing": rng.choice(words("things"))}
    pair = (subject, indirect) if rng.random() < 0.5 else (indirect, subject)
    clean = templates[name].format(b=pair[0], a=pair[1], s=subject, **fields)
    if flip:
        corrupt = templates[name].format(b=pair[0], a=pair[1], s=indirect, **fields)
    else:
        corrupt = templates[name].format(b=others[0], a=others[1], s=others[2], **fields)
    return Example(clean, corrupt, (f" {indirect}",), (f" {subject}",), name)


def greater_than(rng: np.random.Generator, *, templates: Mapping[str, str] = YEARS) -> Example:
    """The last two digits of a year that must come after the first one (E.1).

    The first year's last two digits are 02 to 98, those of the corrupt prompt 01.
    """
    name, noun = str(rng.choice(list(templates))), rng.choice(words("events"))
    century, year = int(rng.integers(11, 18)), int(rng.integers(2, 99))
    clean, corrupt = (
        templates[name].format(noun=noun, start=f"{century}{first:02d}", century=century)
        for first in (year, 1)
    )
    numbers = [f"{number:02d}" for number in range(100)]
    return Example(clean, corrupt, tuple(numbers[year + 1 :]), tuple(numbers[: year + 1]), name)


def docstring(rng: np.random.Generator, *, printed: bool = False) -> Example:
    """The third argument of a function whose docstring documents the first two (E.3)."""
    function = rng.choice(words("functions"))
    first, second, third, *others = map(str, rng.choice(words("arguments"), 6, replace=False))
    filler = [str(word) for word in rng.choice(words("words"), 18, replace=False)]

    def prompt(arguments: list[str], documented: list[str], last: str) -> str:
        return (
            f"def {function}(self, {', '.join(arguments)}):\n"
            f'    """{" ".join(filler[:10])}\n\n'
            f"    :param {documented[0]}: {' '.join(filler[10:14])}\n"
            f"    :param {documented[1]}: {' '.join(filler[14:])}\n"
            f"    {last}"
        )

    clean = prompt([first, second, third], [first, second], ":param")
    corrupt = prompt(others, [second, first], "param" if printed else ":param")
    return Example(clean, corrupt, (f" {third}",), (f" {first}", f" {second}"), "docstring")

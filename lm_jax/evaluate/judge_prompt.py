"""What a judge is asked: instructions, and texts with their strongest words marked.

The wording is ours; `read_rubric` takes other instructions, such as those of a paper.
"""

from collections.abc import Sequence
import math
import os

from lm_jax.errors import BadInputError
from lm_jax.text import lines

# The scores that an answer has.
SCORES = ("disentanglement", "coverage", "themes")
# The paper gives an evaluator ten texts; more would also exceed the context of a small model.
MOST_TEXTS = 10
# Share of a text's words that is marked. The released script marks 80 %, which hides the pattern;
# the paper's own example marks about this much.
MARKED = 0.2

# The words of a text and their gates, in order.
MarkedText = tuple[Sequence[str], Sequence[float]]

RUBRIC = """\
One part of a language model answers to some texts far more than to others. Below are {count} \
texts that it answers to, the strongest first. The words that it answers to most stand between « \
and », and again beneath each text.

Say what the texts have in common. That may be a subject, a kind of word, a grammatical form, a \
punctuation mark, a tone, a place in the sentence: whatever comes back in several of them. Go by \
the marked words; where they show no pattern, go by the texts as wholes. If nothing comes back, \
say so and give low scores.

Reply with one JSON object and nothing before or after it. It has exactly these fields:
"theme": the main theme, in at most twelve words.
"disentanglement": a number from 1 to 10. 10 if the main theme stands alone, 1 if it is lost among \
others.
"coverage": a number from 1 to 10. Out of every ten texts, how many hold the main theme.
"themes": a whole number from 1 to 10. How many unrelated themes there are; 10 also for more.
"explanation": two or three sentences that give the reasons for the theme and the scores.
"""


def read_rubric(file: str | os.PathLike[str]) -> str:
    """A rubric of the user: a text file with the instructions that precede the texts.

    It must ask for the object that `parse` reads, so its fields must be named in it.

    Raises:
      BadInputError: it cannot be read, or does not name a field.
    """
    text = lines.read_text(file)
    if missing := [field for field in ("theme", *SCORES, "explanation") if field not in text]:
        raise BadInputError(
            f"{file} does not ask for {', '.join(missing)}; a rubric must name the fields of the "
            "JSON object that is read"
        )
    return text.rstrip("\n") + "\n"


def prompt(
    texts: Sequence[MarkedText],
    rubric: str = RUBRIC,
    *,
    marked: float = MARKED,
    most_texts: int = MOST_TEXTS,
) -> str:
    """The prompt about some texts, of which the first `most_texts` are included.

    Args:
      texts: words and gates, strongest text first.
      rubric: what precedes them; "{count}" in it becomes their number.
      marked: share of a text's words that is marked: the strongest, without those of gate 0.
      most_texts: the most texts that are included, the first ones.
    """
    parts = []
    for count, (words, gates) in enumerate(texts[:most_texts], 1):
        strongest = _strongest(gates, marked)
        # One line each, because line ends separate the texts.
        bare = [" ".join(word.split()) for word in words]
        text = " ".join(
            f"«{word}»" if place in strongest else word for place, word in enumerate(bare) if word
        )
        repeated = ", ".join(bare[place] for place in sorted(strongest) if bare[place])
        parts.append(f"Text {count}: {text}\nMarked in text {count}: {repeated or 'nothing'}\n")
    return "\n".join([rubric.replace("{count}", str(len(parts))), *parts])


def _strongest(gates: Sequence[float], share: float) -> set[int]:
    """Indices of the largest gates: this share of all, at least one, and never a gate of 0."""
    most = math.ceil(share * len(gates))
    order = sorted(range(len(gates)), key=lambda place: -gates[place])
    return {place for place in order[:most] if gates[place] > 0}

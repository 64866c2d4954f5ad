"""The answer of a judge: one JSON object with a theme and its scores.

Chat models put it in a fence or words around it. What is no such object is refused whole.
"""

import dataclasses
import json
import re
from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.evaluate.judge_prompt import SCORES
from lm_jax.run.results import Count

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Label:
    """A judge's theme and scores of some texts; scores are from 1 to 10."""

    theme: str
    disentanglement: float
    coverage: float
    themes: Count
    explanation: str


def parse(answer: str) -> Label:
    """Parses the label of an answer: one JSON object with theme, explanation and scores 1 to 10.

    Words before and after the object, and a fence around it, are ignored.

    Raises:
      BadInputError: there is no object or more than one, or its fields are wrong.
    """
    objects = _objects(answer)
    if len(objects) != 1:
        raise BadInputError(
            f"answer {_cut(answer)} has {len(objects)} JSON objects instead of one; ask again"
        )
    (label,) = objects
    wanted = {"theme", "explanation", *SCORES}
    if label.keys() != wanted:
        raise BadInputError(
            f"answer {_cut(answer)} is not an object with {', '.join(sorted(wanted))}; ask again"
        )
    for field in ("theme", "explanation"):
        if not _is_text(label[field]):
            raise BadInputError(f"answer {_cut(answer)}: {field} must be a text; ask again")
    for field in SCORES:
        kind = int if field == "themes" else int | float
        value = label[field]
        if isinstance(value, bool) or not isinstance(value, kind) or not 1 <= value <= 10:
            raise BadInputError(
                f"answer {_cut(answer)}: {field} = {value!r} must be a number from 1 to 10"
            )
    return Label(**label)


def _is_text(value: Any) -> bool:
    """Whether a value is a text that is not blank, without the lone surrogates of broken JSON."""
    return isinstance(value, str) and bool(value.strip()) and not _SURROGATE.search(value)


def _objects(answer: str) -> list[dict[str, Any]]:
    """The outermost JSON objects of a text; none if any brace opens no valid object."""
    result, decoder = [], json.JSONDecoder()
    start = answer.find("{")
    while start >= 0:
        try:
            label, stop = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            # What is inside a broken object is not the answer.
            return []
        result.append(label)
        start = answer.find("{", stop)
    return result


def _cut(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")

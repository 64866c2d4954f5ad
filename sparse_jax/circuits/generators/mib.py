"""Rows of MIB's tasks (Mueller et al. 2025) as examples.

A row of its data sets of multiple choice, such as `mib-bench/ioi` and `mib-bench/copycolors_mcqa`,
has "prompt", "choices" (texts, or an object whose "label" lists them), "answerKey" (index of the
right one) and counterfactuals, each an object of the same three under a name that ends with
`_counterfactual`. What is right after the counterfactual prompt is the wrong continuation.
"""

from collections.abc import Mapping
from typing import Any

from lm_jax.errors import BadInputError
from sparse_jax.circuits.generators.examples import Example

_END = "_counterfactual"
# Those of MIB's circuit track, where a row has several.
_CHOSEN = ("s2_io_flip_counterfactual", "symbol_counterfactual")


def is_row(tree: Any) -> bool:
    """Whether a line is of MIB's data sets rather than one with the fields of `Example`."""
    return isinstance(tree, Mapping) and "prompt" in tree and "clean" not in tree


def example(row: Mapping[str, Any], where: str) -> Example:
    """The example of a row.

    Args:
      row: the row; its counterfactual is that of MIB's circuit track, or the only one.
      where: file and line, for messages.

    Raises:
      BadInputError: it has no such counterfactual, or a field is missing or of another type.
    """
    names = [name for name in row if name.endswith(_END)]
    chosen = [name for name in _CHOSEN if name in names] or names
    if not names or (len(chosen) > 1 and chosen == names):
        raise BadInputError(
            f"{where}: {len(names)} fields end with {_END}, and none is {' or '.join(_CHOSEN)}; "
            "leave one of them in the row"
        )
    other = row[chosen[0]]
    if not isinstance(other, Mapping):
        raise BadInputError(f"{where}: {chosen[0]} must be an object with a prompt and choices")
    (clean, right), (corrupt, wrong) = (
        _answered(row, where),
        _answered(other, f"{where}: {chosen[0]}"),
    )
    return Example(clean, corrupt, (right,), (wrong,), str(row.get("template") or ""))


def _answered(tree: Mapping[str, Any], where: str) -> tuple[str, str]:
    """A prompt and its right continuation, with its leading space."""
    prompt, choices, key = (tree.get(name) for name in ("prompt", "choices", "answerKey"))
    if isinstance(choices, Mapping):
        choices = choices.get("label")
    if not isinstance(prompt, str) or not prompt:
        raise BadInputError(f"{where}: prompt = {prompt!r} must be a text; write it")
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise BadInputError(
            f"{where}: choices must be a list of texts, or an object whose label is one"
        )
    if type(key) is not int or not 0 <= key < len(choices):
        raise BadInputError(
            f"{where}: answerKey = {key!r} must be the index of one of {len(choices)} choices"
        )
    answer = choices[key]
    return prompt, answer if answer[:1].isspace() or prompt[-1].isspace() else f" {answer}"

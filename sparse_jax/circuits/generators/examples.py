"""What a circuit task consists of before a tokenizer: examples as text, and our own word lists."""

import dataclasses
import functools
import importlib.resources
import tomllib


@dataclasses.dataclass(frozen=True)
class Example:
    """A clean prompt, its corruption, and the continuations that are right and wrong.

    Attributes:
      clean, corrupt: prompts.
      answers: right continuations of the clean prompt, with their leading space.
      wrong_answers: continuations to compare with.
      template: name of the wording; rephrasings of a task have other names.
    """

    clean: str
    corrupt: str
    answers: tuple[str, ...]
    wrong_answers: tuple[str, ...]
    template: str = ""


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Our own word list of this kind: names, places, things, events, arguments and so on."""
    file = importlib.resources.files("sparse_jax.circuits.generators").joinpath("words.toml")
    return tuple(tomllib.loads(file.read_text("utf-8"))[kind].split())

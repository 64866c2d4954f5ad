"""Generators of circuit tasks: those of the paper, and those of stories.

A generator draws one `Example` from a NumPy generator. The word lists are our own; whether a word
is one token is up to the tokenizer, and `tasks.encode` drops the examples that do not fit it.

examples    what a task consists of before a tokenizer, and the word lists
paper       copy, IOI, greater-than, docstring (section 4.2, appendix E)
mib         rows of MIB's data sets
stories     what a small model of children's stories solves
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Literal

import numpy as np

from sparse_jax.circuits.generators import mib, paper, stories
from sparse_jax.circuits.generators.examples import Example, words

__all__ = ["GENERATORS", "REPHRASED", "Answer", "Example", "Generator", "mib", "words"]

Answer = Literal["token", "number", "tokens"]


@dataclasses.dataclass(frozen=True)
class Generator:
    """A task: how its examples are drawn and measured.

    Attributes:
      draw: one example.
      metric: default name in `metrics.METRICS`.
      answer: "number" for two-digit continuations, which a tokenizer may spell in two tokens;
        "tokens" for those that may have any number of tokens.
    """

    draw: Callable[[np.random.Generator], Example]
    metric: str = "logit_difference"
    answer: Answer = "token"


GENERATORS: Mapping[str, Generator] = {
    "copy": Generator(paper.copy),
    "copy_unspaced": Generator(lambda rng: paper.copy(rng, separator="")),
    "ioi": Generator(paper.ioi),
    "ioi_flip": Generator(lambda rng: paper.ioi(rng, flip=True)),
    "ioi_rephrased": Generator(lambda rng: paper.ioi(rng, templates=paper.IOI_REPHRASED)),
    "ioi_long": Generator(lambda rng: paper.ioi(rng, templates=paper.IOI_LONG)),
    "greater_than": Generator(paper.greater_than, "probability_difference", "number"),
    "docstring": Generator(paper.docstring),
    "docstring_printed": Generator(lambda rng: paper.docstring(rng, printed=True)),
    **{name: Generator(draw) for name, draw in stories.DRAWS.items()},
}
# Other wordings that come with a task.
REPHRASED: Mapping[str, str] = {"ioi": "ioi_rephrased", **stories.REPHRASED}

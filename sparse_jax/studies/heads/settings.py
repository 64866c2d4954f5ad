"""Settings of `iaj sparse heads`: the frozen dataclass that a config file becomes."""

import dataclasses
import re
from typing import Annotated

from lm_jax.run.settings import READ_AT_ONCE, READS_MODEL, PositiveInt, at_least
from lm_jax.study import Settings
from lm_jax.text.preparation import CorpusConfig

# Fewest tokens of a text, and of a row of random tokens that comes twice.
LEAST, LEAST_ROW = 4, 3


@dataclasses.dataclass(frozen=True)
class HeadsConfig(Settings):
    """Everything that decides what is measured and shown.

    Attributes:
      model: a Hugging Face folder, a GGUF file, a name of iaj fetch --list, or a sparse model.
      heads: heads to show, each as layer.head; none for the strongest of each kind.
      corpus: texts to measure on; its `max_tokens`, `splits` and `vocab_size` are ignored.
      texts: number of texts.
      context: number of tokens that are read of a text.
      repeated: number of rows of random tokens, each twice, of lengths up to half the context.
      shown: number of heads of each kind, and of texts of a head, on the page.
      seed: random seed of the random tokens.
    """

    model: Annotated[str, READS_MODEL] = "smollm2"
    heads: tuple[str, ...] = ()
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(1.0, 0.0, 0.0))
    )
    texts: PositiveInt = 64
    context: Annotated[PositiveInt, READ_AT_ONCE] = 64
    repeated: PositiveInt = 8
    shown: PositiveInt = 3
    seed: Annotated[int, at_least(0)] = 0

    def problems(self) -> list[str]:
        """What does not fit together."""
        wrong = [head for head in self.heads if not re.fullmatch(r"\d+\.\d+", head)]
        if wrong:
            return [f"config.heads: {wrong[0]!r} is no head; name each as layer.head, such as 5.3"]
        if self.context < 2 * LEAST_ROW + 1:
            return [f"config.context = {self.context} must be {2 * LEAST_ROW + 1} or more"]
        return []

    @property
    def places(self) -> list[tuple[int, int]]:
        """Layer and head of each of `heads`."""
        pairs = (head.split(".") for head in self.heads)
        return [(int(layer), int(head)) for layer, head in pairs]


def smoke(config: HeadsConfig) -> HeadsConfig:
    """The same in seconds: few short texts."""
    return dataclasses.replace(config, texts=2, context=16, repeated=1, shown=1)

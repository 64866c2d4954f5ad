"""Settings of `iaj polyattn bench`: the frozen dataclass that a config file becomes."""

import dataclasses
from typing import Annotated, Literal

from lm_jax.run.settings import READS_MODEL, PositiveInt, Settings, at_least, different
from polyattn_jax.recipes.decoding.state_attention import state_mixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(Settings):
    """Everything that decides what is timed.

    Attributes:
      model: a Hugging Face folder, a GGUF file, a name of iaj fetch --list, or a run of iaj protot
        with softmax attention.
      recipes: what replaces softmax in all heads; each must have a state of one size.
      lengths: tokens of the text before the first that is timed.
      tokens: number of tokens that a turn decodes.
      turns: number of times that each is timed.
      dtype: dtype of weights and caches.
    """

    model: Annotated[str, READS_MODEL] = "smollm2"
    recipes: tuple[str, ...] = ("window:w=64,sinks=4", "hedgehog:w=64,sinks=4")
    lengths: Annotated[tuple[int, ...], different(at_least(1))] = (1_024, 8_192, 32_768)
    tokens: PositiveInt = 16
    turns: Annotated[int, at_least(3)] = 5
    dtype: Literal["float32", "bfloat16"] = "float32"

    def problems(self) -> list[str]:
        """What does not fit together."""
        for text in self.recipes:
            state_mixer(text)
        if not self.recipes or len(set(self.recipes)) < len(self.recipes):
            return ["config.recipes must name one or more recipes, each once"]
        return []


def smoke(config: BenchConfig) -> BenchConfig:
    """The same on two short lengths, with two tokens a turn."""
    return dataclasses.replace(config, lengths=(16, 32), tokens=2, turns=3)

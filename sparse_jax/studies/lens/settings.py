"""Settings of `iaj sparse lens`: the frozen dataclass that a config file becomes."""

import dataclasses
from typing import Annotated

from lm_jax.run.settings import READS_FILE, READS_MODEL, PositiveInt, at_least
from lm_jax.study import Settings
from lm_jax.text.preparation import CorpusConfig


@dataclasses.dataclass(frozen=True)
class LensConfig(Settings):
    """Everything that decides what is read.

    Attributes:
      model: a Hugging Face folder, a GGUF file, a name of iaj fetch --list, a sparse model, or a
        run of iaj protot.
      lens: a .safetensors file of a lens of that model; "" to fit one.
      prompts: texts to read out by layer and position.
      split: layers whose readout at the end of each prompt is split by the heads that carry it.
      corpus: texts, of which the first are held out and the next are for the fit; its `max_tokens`,
        `splits` and `vocab_size` are ignored.
      texts: number of texts for the fit.
      held_out: number of texts on which the lenses are compared with the model.
      context: number of tokens that are read of a text.
      rows: number of rows of the Jacobian that a text gives.
      skipped: first tokens of a text that are left out.
    """

    model: Annotated[str, READS_MODEL] = "smollm2"
    lens: Annotated[str, READS_FILE] = ""
    prompts: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    corpus: CorpusConfig = dataclasses.field(
        default_factory=lambda: CorpusConfig("wiki", "document", splits=(1.0, 0.0, 0.0))
    )
    texts: PositiveInt = 200
    held_out: PositiveInt = 20
    context: PositiveInt = 128
    rows: PositiveInt = 16
    skipped: Annotated[int, at_least(0)] = 16

    def problems(self) -> list[str]:
        """What does not fit together."""
        problems = []
        if self.context < self.skipped + 2:
            problems.append(
                f"config.context = {self.context} must be {self.skipped + 2} or more, two more "
                "than config.skipped"
            )
        if self.split and not self.prompts:
            problems.append("config.split splits readouts of prompts; name one, config.prompts")
        return problems


def smoke(config: LensConfig) -> LensConfig:
    """The same in seconds: few short texts, of which each gives many rows."""
    return dataclasses.replace(config, texts=2, held_out=2, context=24, rows=10**6)

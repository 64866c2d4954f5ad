"""Settings of generation and judging: the models, the prompts, the sampler and the judges."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from lm_jax.model.sampling import Sampling
from lm_jax.run.config import config_hash
from lm_jax.run.settings import READS_FILE, READS_RUN, Flag, at_least
from lm_jax.study import Settings
from protot_jax.training.run_options import folder_beside

FOLDER = "judging"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgingConfig(Settings):
    """Settings of generation and judging.

    Attributes:
      run: work folder of a pretraining run, folder of one of its seeds, exported model, or a name
        of iaj fetch --list; one flag for each.
      checkpoint: checkpoint of lowest validation perplexity, or the last one.
      judge: tokens:FOLDER, perplexity:FOLDER, cached:FILE or chat:MODEL@URL; one flag for each.
      prompts: file of JSON lines with prompt and reference; default test documents.
      count: how many prompts at most.
      prompt_tokens: length of a prompt from a test document.
      new_tokens: the most tokens that a model generates.
      temperature: temperature of the sampled continuations.
      top_k: number of most probable tokens to sample from; 0 for all.
      top_p: total probability of the most probable tokens to sample from.
      repetition_penalty: penalty of sampled tokens that occurred; 1 for none.
      no_repeat_ngram: length of n-grams that are not sampled twice; 0 for none.
      seed: random seed of prompts, sampler, controls and bootstrap.
      resamples: number of bootstrap samples.
    """

    run: Annotated[tuple[str, ...], Flag(repeated=True, required=True), READS_RUN] = ()
    checkpoint: Annotated[Literal["best", "last"], Flag()] = "best"
    judge: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    prompts: Annotated[str, Flag(), READS_FILE] = ""
    count: Annotated[int, Flag(), at_least(2)] = 100
    prompt_tokens: Annotated[int, Flag(), at_least(2)] = 100
    new_tokens: Annotated[int, Flag(), at_least(2)] = 50
    temperature: Annotated[float, Flag()] = 0.8
    top_k: Annotated[int, Flag()] = 40
    top_p: Annotated[float, Flag()] = 0.95
    repetition_penalty: Annotated[float, Flag()] = 1.05
    no_repeat_ngram: Annotated[int, Flag()] = 4
    seed: Annotated[int, Flag(), at_least(0)] = 0
    resamples: Annotated[int, Flag(), at_least(100)] = 1_000

    def problems(self) -> list[str]:
        problems = [
            f"--judge={name} is given twice; give each judge once"
            for name in dict.fromkeys(self.judge)
            if self.judge.count(name) > 1
        ]
        if self.temperature == 0:
            problems.append("temperature = 0 is greedy, which is measured in any case; give more")
        return problems

    def default_folder(self) -> Path:
        """A folder below the first run for what is asked of these models."""
        return folder_beside(self.run[0], FOLDER, config_hash(self)[:12])

    @property
    def sampling(self) -> Sampling:
        """The sampler of the continuations that are not greedy.

        Raises:
          UsageError: no sampler can have these values.
        """
        names = [field.name for field in dataclasses.fields(Sampling)]
        return Sampling(**{name: getattr(self, name) for name in names})


def smoke(config: JudgingConfig) -> JudgingConfig:
    """A few short prompts, in seconds."""
    return dataclasses.replace(
        config, count=4, prompt_tokens=12, new_tokens=4, no_repeat_ngram=2, resamples=100
    )

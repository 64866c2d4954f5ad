"""Settings of a concept report: the frozen dataclass that its config file becomes."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from lm_jax.evaluate.judge_prompt import MARKED, MOST_TEXTS
from lm_jax.run.settings import READS_FILE, Flag, at_least
from protot_jax.studies.concepts.collect import LEAST
from protot_jax.studies.concepts.ranking import RankBy
from protot_jax.training.run_options import RunSettings, folder_beside

FOLDER = "concepts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConceptConfig(RunSettings):
    """The texts to analyse, the judge, and how much is shown.

    Attributes:
      split: split of the run's prepared data.
      texts: maximum number of documents to read.
      length: number of tokens of each document, its beginning-of-sequence token included.
      batch_size: number of documents in one forward pass.
      top: number of texts and of tokens to show of each prototype.
      rank_by: statistic of the write gate that ranks a prototype's texts.
      judge: judge that names the themes: null for none, local:FOLDER, cached:FILE or
        chat:MODEL@URL.
      rubric: a text file with other instructions for the judge, such as those of a paper.
      marked: share of a text's words that is marked for the judge, the strongest ones.
      judge_texts: the most of the --top texts that are given to the judge.
      judge_tokens: maximum number of tokens of the judge's answer; 0 for 256 of local:FOLDER and
        for no limit of chat:MODEL@URL.
      judge_temperature: temperature at which local:FOLDER or chat:MODEL@URL samples its answer; 0
        for greedy.
      compare: heads:RUN or sae:RUN, units of another model on the same prepared data.
      resamples: number of bootstrap samples, and of permutations of each test.
      seed: random seed of the permutations and bootstrap samples.
      ablated: number of a prototype's texts on which it is left out and words are attributed; 0 for
        none; memory grows with the square of --length.
    """

    split: Annotated[Literal["train", "validation", "test"], Flag()] = "validation"
    texts: Annotated[int, Flag(), at_least(2)] = 4_000
    length: Annotated[int, Flag(), at_least(LEAST + 1)] = 32
    batch_size: Annotated[int, Flag(), at_least(1)] = 64
    top: Annotated[int, Flag(), at_least(1)] = 10
    rank_by: Annotated[RankBy, Flag()] = "mean"
    judge: Annotated[str, Flag()] = "null"
    rubric: Annotated[str, Flag(), READS_FILE] = ""
    marked: Annotated[float, Flag()] = MARKED
    judge_texts: Annotated[int, Flag(), at_least(1)] = MOST_TEXTS
    judge_tokens: Annotated[int, Flag(), at_least(0)] = 0
    judge_temperature: Annotated[float, Flag(), at_least(0)] = 0.0
    compare: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    resamples: Annotated[int, Flag(), at_least(99)] = 1_000
    seed: Annotated[int, Flag(), at_least(0)] = 0
    ablated: Annotated[int, Flag(), at_least(0)] = 2

    def default_folder(self) -> Path:
        """The folder of the run that its concepts are in."""
        return folder_beside(self.run, FOLDER)


def smoke(config: ConceptConfig) -> ConceptConfig:
    """The same report of twelve texts."""
    return dataclasses.replace(config, texts=12, length=16, top=2, resamples=99, ablated=1)

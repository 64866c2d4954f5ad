"""Settings of interventions: the sentences, the prototype, its controls, and the amount of text."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Annotated

from lm_jax.report.markup import slug
from lm_jax.run.settings import READS_FILE, Flag, at_least
from protot_jax.studies.interventions import sentences
from protot_jax.studies.interventions.sentences import Sentence
from protot_jax.training.run_options import RunSettings, folder_beside

FOLDER = "interventions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterventionConfig(RunSettings):
    """Settings of interventions.

    Attributes:
      concept: concepts whose sentences are used, one or several.
      sentences: a .jsonl or .tsv file of sentences; default those of the package.
      words: words by which the prototype is chosen, the one that writes them most specifically;
        default the targets.
      layer: layer of the prototype, from 0; default chosen by the words.
      prototype: index of the prototype in its layer, from 0.
      reinit_draws: number of random new vectors for the prototype.
      control_draws: number of random new vectors for each other prototype.
      seed: random seed of the new vectors and bootstrap samples.
      controls: measure every other prototype as well.
      least_probability: exclude sentences whose target has a lower baseline probability.
      all_subtokens: use the probability of all tokens of a target, not only of its first.
      gate_rows: number of validation rows to rank and match prototypes on.
      perplexity_rows: number of validation rows whose perplexity is measured; 0 for none.
      match_seeds: repeat with the matching prototypes of the run's other seeds.
      other_runs: work folders of runs, or names of iaj fetch --list; repeat in all of their seeds.
      together: concepts that are tested at once with the one that is named; set by the study.
    """

    concept: Annotated[tuple[str, ...], Flag()] = ()
    sentences: Annotated[str, Flag(), READS_FILE] = ""
    words: Annotated[tuple[str, ...], Flag()] = ()
    layer: Annotated[int | None, Flag(), at_least(0)] = None
    prototype: Annotated[int | None, Flag(), at_least(0)] = None
    reinit_draws: Annotated[int, Flag(), at_least(1)] = 20
    control_draws: Annotated[int, Flag(), at_least(1)] = 5
    seed: Annotated[int, Flag("reinit_seed"), at_least(0)] = 0
    controls: Annotated[bool, Flag()] = True
    least_probability: Annotated[float, Flag(), at_least(0.0)] = 0.01
    all_subtokens: Annotated[bool, Flag()] = False
    gate_rows: Annotated[int, Flag(), at_least(1)] = 512
    perplexity_rows: Annotated[int, Flag(), at_least(0)] = 32
    match_seeds: Annotated[bool, Flag()] = True
    other_runs: Annotated[tuple[str, ...], Flag()] = ()
    together: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        problems = []
        if (self.layer is None) != (self.prototype is None):
            problems.append("--layer and --prototype go together; give both, or neither")
        if self.words and self.concepts[1:]:
            problems.append(
                "--words chooses the prototype of one concept; leave it out for several"
            )
        return problems

    @property
    def concepts(self) -> tuple[str | None, ...]:
        """The different concepts; None for all sentences of the file."""
        return tuple(dict.fromkeys(self.concept)) or (None,)

    @property
    def used_control_draws(self) -> int:
        """Draws for each other prototype: no more than for the chosen one."""
        return min(self.control_draws, self.reinit_draws)

    def sentences_of(self, concept: str | None) -> list[Sentence]:
        """The sentences of a concept.

        Raises:
          UsageError: neither a file nor a concept is named, or an unknown one.
          BadInputError: the file cannot be used.
        """
        return sentences.of_source(self.sentences, concept)

    def words_of(self, own: Sequence[Sentence]) -> tuple[str, ...]:
        """The words that choose the prototype of sentences; empty for one that is named."""
        if self.words or self.layer is not None:
            return self.words
        return tuple(dict.fromkeys(sentence.target for sentence in own))

    def default_folder(self) -> Path:
        """A folder of the run for the concepts, or for the words or the file of sentences."""
        if self.concept:
            about = " ".join(filter(None, self.concepts))
        elif self.layer is None:
            about = " ".join(self.words_of(self.sentences_of(None)))
        else:
            about = Path(self.sentences).stem
        place = (
            "" if self.layer is None or self.concepts[1:] else f" l{self.layer} p{self.prototype}"
        )
        return folder_beside(self.run, FOLDER, slug(about + place))


def smoke(config: InterventionConfig) -> InterventionConfig:
    """Few draws on little text, in seconds."""
    return dataclasses.replace(
        config,
        reinit_draws=2,
        control_draws=1,
        gate_rows=16,
        perplexity_rows=2,
        match_seeds=False,
    )

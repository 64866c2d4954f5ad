"""Settings of robustness: the runs, the sentences, the slices and how they are filtered."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
import re
from typing import Annotated, Literal

from lm_jax.errors import UsageError, nearest
from lm_jax.run.settings import READS_FILE, READS_RUN, Flag, at_least
from lm_jax.study import Settings
from protot_jax.studies.robustness import meaning
from protot_jax.training.run_options import folder_beside

FOLDER = "robustness"
NOISE = (
    *("abbreviation", "contraction", "morphology", "punctuation", "spelling", "synonym"),
    *("typo", "typo_any"),
)
# Only run when named explicitly.
OPTIONAL = ("morphology_any", "synonym_pos")
PERTURBATIONS = (*NOISE, *OPTIONAL)
DEFAULT = (*NOISE, *meaning.SLICES)
SLICES = (*PERTURBATIONS, *meaning.SLICES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobustnessConfig(Settings):
    """Settings of robustness.

    Attributes:
      run: work folder of a pretraining run, or of one of its seeds, or a name of iaj fetch --list;
        one flag for each.
      run_seed: seed of every run's model; default each run's first.
      checkpoint: checkpoint of lowest validation perplexity, or the last one.
      sentences: a .jsonl file of sentences or pairs; default validation text of the first run.
      slices: slices to measure, of abbreviation, contraction, morphology, punctuation, spelling,
        synonym, typo, typo_any, morphology_any, synonym_pos, gender, negation, number, gender_tag,
        negation_tag, number_tag; default all but morphology_any, synonym_pos.
      pairs: greatest number of pairs of a slice; 500 in the paper.
      seed: random seed of sentences, perturbations and intervals.
      wordnet: folder with WordNet's index.sense, for synonyms.
      least_similarity: leave out pairs of a lower similarity, 0.75 in the paper; default not
        measured.
      held: prototypes whose routing is held, as L2P5; default all.
      released_clamp: hold the routing also as the released code does, at the last token alone.
    """

    run: Annotated[tuple[str, ...], Flag(repeated=True, required=True), READS_RUN] = ()
    run_seed: Annotated[int | None, Flag()] = None
    checkpoint: Annotated[Literal["best", "last"], Flag()] = "best"
    sentences: Annotated[str, Flag(), READS_FILE] = ""
    slices: Annotated[tuple[str, ...], Flag()] = ()
    pairs: Annotated[int, Flag(), at_least(1)] = 100
    seed: Annotated[int, Flag(), at_least(0)] = 0
    wordnet: Annotated[str, Flag(), READS_FILE] = ""
    least_similarity: Annotated[float | None, Flag()] = None
    held: Annotated[tuple[str, ...], Flag()] = ()
    released_clamp: Annotated[bool, Flag()] = False

    def problems(self) -> list[str]:
        return [
            f"slices: {name!r} is none of {', '.join(SLICES)}{nearest(name, SLICES)}"
            for name in self.slices
            if name not in SLICES
        ]

    def default_folder(self) -> Path:
        """A folder of the first run."""
        return folder_beside(self.run[0], FOLDER)


def parse_held(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Parses prototypes such as "L2P5" as layer and prototype.

    Raises:
      UsageError: a text has another form.
    """
    found = [re.fullmatch(r"L(\d+)P(\d+)", text) for text in texts]
    for text, match in zip(texts, found, strict=True):
        if match is None:
            raise UsageError(f"held = {text!r} is not of the form L2P5")
    return tuple((int(match[1]), int(match[2])) for match in found if match)


def smoke(config: RobustnessConfig) -> RobustnessConfig:
    """Two pairs of two slices that need no other data, in seconds."""
    return dataclasses.replace(config, slices=("typo", "gender"), pairs=2)

"""Settings of a benchmark: the corpora, its size, and its checks."""

from collections.abc import Iterator
import dataclasses
from typing import Annotated

from lm_jax.errors import nearest
from lm_jax.run.settings import READS_FILE, Flag, at_least
from lm_jax.study import Settings
from lm_jax.text.preparation import READS_CORPUS
from lm_jax.text.splits import SPLITS
from protot_jax.studies.robustness.sentences import KINDS
from protot_jax.studies.robustness.settings import NOISE, PERTURBATIONS

PAPER_SLICES = tuple(name for name in NOISE if name != "typo_any")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerturbationsConfig(Settings):
    """The corpora, the size of the benchmark, and its checks.

    Attributes:
      corpus: KIND:SOURCE, a corpus of kind text, dialogue or news.
      field: column of the text in .jsonl and .parquet.
      licence: licence of the corpora that are files of yours, for the record.
      slices: slices, of abbreviation, contraction, morphology, punctuation, spelling, synonym,
        typo, typo_any, morphology_any, synonym_pos; default the paper's, which are the first seven.
      pairs: number of pairs of a slice.
      mix: greatest number of sentences of all corpora.
      splits: splits of the corpora that sentences are taken from, of train, validation, test;
        sentences of the training split say nothing about new text.
      seed: random seed of sentences, perturbations and flips.
      wordnet: folder with WordNet's index.sense, for synonyms.
      least_zipf: least Zipf frequency of a new word, in the corpora.
      least_similarity: least similarity of a pair by MiniLM.
      similar: slices that the similarity is a check of.
    """

    corpus: Annotated[tuple[str, ...], Flag(repeated=True), READS_CORPUS] = ("sotu", "wiki")
    field: Annotated[str, Flag()] = "text"
    licence: Annotated[str, Flag()] = ""
    slices: Annotated[tuple[str, ...], Flag()] = ()
    pairs: Annotated[int, Flag(), at_least(1)] = 500
    mix: Annotated[int, Flag(), at_least(1)] = 30_000
    splits: Annotated[tuple[str, ...], Flag()] = ("validation", "test")
    seed: Annotated[int, Flag(), at_least(0)] = 42
    wordnet: Annotated[str, Flag(), READS_FILE] = ""
    least_zipf: Annotated[float, Flag()] = 3.0
    least_similarity: Annotated[float, Flag()] = 0.75
    similar: Annotated[tuple[str, ...], Flag()] = ("synonym",)

    def problems(self) -> list[str]:
        named = [parse_corpus(text) for text in self.corpus]
        problems = [
            f"--corpus={text!r} names no source; write it as {kind}:FOLDER"
            for text, (kind, source) in zip(self.corpus, named, strict=True)
            if not source
        ]
        if not self.corpus:
            problems.append("--corpus is missing; name one or more, each KIND:SOURCE")
        problems += _unknown("slices", self.slices, PERTURBATIONS)
        problems += _unknown("similar", self.similar, PERTURBATIONS)
        problems += _unknown("splits", self.splits, SPLITS)
        return problems


def _unknown(flag: str, names: tuple[str, ...], known: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"--{flag}: {name!r} is none of {', '.join(known)}{nearest(name, known)}"


def parse_corpus(text: str) -> tuple[str, str]:
    """Kind and source of "KIND:SOURCE"; the kind is text where none is named."""
    kind, _, source = text.partition(":")
    return (kind, source) if kind in KINDS else ("text", text)


def smoke(config: PerturbationsConfig) -> PerturbationsConfig:
    """Two pairs of two slices that need no other data, in seconds."""
    return dataclasses.replace(config, slices=("typo", "contraction"), pairs=2, mix=200)


def wikitext2(config: PerturbationsConfig) -> PerturbationsConfig:
    """The one text corpus of the paper that can be fetched, in place of the default ones."""
    return dataclasses.replace(config, corpus=("wikitext2",))

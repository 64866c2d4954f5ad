"""The record of a benchmark: all that decides the bytes of its two files, and their counts."""

import dataclasses
from typing import Literal

from lm_jax.run.results import Count
from lm_jax.text.preparation import CorpusConfig

NAME: Literal["protot_jax.robustness.benchmark"] = "protot_jax.robustness.benchmark"
VERSION: Literal[2] = 2
MEASURED = "measured"
NOISE_FILE = "perturbation_benchmark.jsonl"
MEANING_FILE = "intervention_benchmark.jsonl"
RECORD = "benchmark.json"


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus of the benchmark.

    Attributes:
      kind: one of `sentences.KINDS`.
      version: version of the asset's package; null for files of the user's.
      files_sha256: digests by file name.
      sentences: number in the mix.
      fragments: number that were drawn and left out, as they are no whole sentences.
      cut: how the source is cut into documents and splits, as `CorpusConfig` has it.
      documents: number of documents in each split.
      trained: number that were drawn and left out, as they stand in a training document too.
    """

    source: str
    kind: str
    licence: str
    version: str | None
    files_sha256: dict[str, str]
    sentences: Count
    fragments: Count
    cut: CorpusConfig
    documents: dict[str, Count]
    trained: Count


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of either file.

    Attributes:
      pairs: number of lines.
      unique_pairs: number of different ones, without regard to case.
      texts: number of different original sentences.
      built: number from built sentences.
      frames: number of different frames of built pairs; 0 where pairs have none.
      splits: number of pairs by split of the original; built ones have none.
      rejected: number of candidates by reason (`screening.REASONS`).
      similarity, distance: means by MiniLM and in characters (Table 12); similarity is null
        without MiniLM.
      missing: why there are fewer pairs than were wanted; empty if there are not.
    """

    name: str
    pairs: Count
    unique_pairs: Count
    texts: Count
    built: Count
    frames: Count
    splits: dict[str, Count]
    rejected: dict[str, Count]
    similarity: float | None
    distance: float | None
    missing: str


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """`summary.json` and `benchmark.json`: what decides the bytes of both files, and their counts.

    Attributes:
      perturbations: version of the generators.
      wanted: pairs of a slice.
      splits: splits that sentences were drawn from.
      similarity: state of the similarity: "measured", or why it was not.
      files: size and sha256 by name.
    """

    schema: Literal["protot_jax.robustness.benchmark"]
    version: Literal[2]
    perturbations: Count
    seed: Count
    wanted: Count
    splits: tuple[str, ...]
    least_zipf: float
    least_similarity: float
    similar: tuple[str, ...]
    similarity: str
    wordnet_sha256: str | None
    built_licence: str
    sources: tuple[Source, ...]
    slices: tuple[Slice, ...]
    files: dict[str, dict[str, str | Count]]

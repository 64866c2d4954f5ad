"""Makes the pairs of both files and their record.

Besides what every study has, the work folder holds

    perturbation_benchmark.jsonl    pairs whose meaning stays
    intervention_benchmark.jsonl    pairs whose gender, negation or number is flipped
    benchmark.json                  the record of both, as `summary.json` has it
"""

from collections import Counter
from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import NamedTuple

from lm_jax.errors import BadInputError
from lm_jax.run import stop
from lm_jax.run.files import content_digest, file_digest, write_json
from lm_jax.study import Opened, Work
from lm_jax.text import corpora
from protot_jax.studies.perturbations import backfill, numbers
from protot_jax.studies.perturbations.drawing import Origin, draw
from protot_jax.studies.perturbations.numbers import BUILT
from protot_jax.studies.perturbations.results import (
    MEANING_FILE,
    MEASURED,
    NAME,
    NOISE_FILE,
    RECORD,
    VERSION,
    Benchmark,
    Slice,
)
from protot_jax.studies.perturbations.screening import Screen, fill
from protot_jax.studies.perturbations.settings import (
    PAPER_SLICES,
    PerturbationsConfig,
    parse_corpus,
)
from protot_jax.studies.robustness import lists, meaning, perturb, sentences
from protot_jax.studies.robustness import pairs as pairs_of
from protot_jax.studies.robustness.perturb import Perturbation
from protot_jax.studies.robustness.results import SkippedSlice
from protot_jax.studies.robustness.sentences import Pair
from protot_jax.studies.robustness.similarity import Encoder

_BUILT_LICENCE = "sentences of the source 'built' are under the licence of this package"


class Task(NamedTuple):
    """What makes the pairs.

    Attributes:
      wordnet: WordNet, where its folder is named.
      made: perturbation of each slice that can be made.
      skipped: slices whose data are missing.
    """

    wordnet: lists.WordNet | None
    made: Mapping[str, Perturbation]
    skipped: Sequence[SkippedSlice]


def inputs(config: PerturbationsConfig) -> Opened:
    """The files of every corpus, WordNet, and the version of the generators.

    Raises:
      BadInputError: a corpus or WordNet cannot be read, or a slice that was named needs data that
        are missing.
    """
    named = dict.fromkeys(parse_corpus(text)[1] for text in config.corpus)
    found = {f"corpus {name}": content_digest(corpora.hashes(name)) for name in named}
    wordnet = lists.WordNet(Path(config.wordnet)) if config.wordnet else None
    return Opened(found | perturb.inputs(wordnet), load=lambda: opened(config, wordnet))


def opened(config: PerturbationsConfig, wordnet: lists.WordNet | None) -> Task:
    """The perturbations of the slices that are named, or of the paper's.

    Raises:
      BadInputError: a slice that was named needs data that are missing.
    """
    wanted = config.slices or PAPER_SLICES
    made, skipped = pairs_of.perturbations(wanted, wordnet, named=bool(config.slices))
    return Task(wordnet, made, skipped)


def measure(config: PerturbationsConfig, work: Work) -> Benchmark:
    """Makes the pairs and writes the three files.

    Raises:
      BadInputError: a corpus has no sentence to take.
      StoppedError: the command was asked to stop.
    """
    noise, flips, record = make(config, work.loaded)
    for name, pairs in ((NOISE_FILE, noise), (MEANING_FILE, flips)):
        sentences.write(work.path / name, pairs)
    files = {name: file_digest(work.path / name) for name in (NOISE_FILE, MEANING_FILE)}
    record = dataclasses.replace(record, files=files)
    write_json(work.path / RECORD, record)
    work.record(data={name: str(entry["sha256"]) for name, entry in files.items()})
    return record


def make(config: PerturbationsConfig, task: Task) -> tuple[list[Pair], list[Pair], Benchmark]:
    """Pairs of both files, each with its source, and the record without the files' digests.

    Raises:
      BadInputError: a corpus has no sentence to take.
    """
    encoder, similarity = None, MEASURED
    try:
        encoder = Encoder()
    except BadInputError as error:
        similarity = str(error)
    counts: Counter[str] = Counter()
    origin, sources = draw(config, counts)
    screen = Screen(counts, config.least_zipf, encoder, config.least_similarity, config.similar)
    noise: list[Pair] = []
    records: list[Slice] = []
    for name, perturbation in task.made.items():
        stop.check("while perturbing sentences")
        lines, rejected = _filled(config, name, perturbation, origin, screen)
        noise += lines
        records.append(numbers.of_slice(name, lines, config.pairs, rejected, encoder))
    records += map(numbers.of_skipped, task.skipped)
    flips = [
        dataclasses.replace(pair, source=BUILT)
        for pair in sentences.flipped(config.pairs, config.seed)
    ]
    for name in meaning.SLICES:
        own = [pair for pair in flips if pair.slice == name]
        records.append(numbers.of_slice(name, own, config.pairs, {}, encoder))
    record = Benchmark(
        schema=NAME,
        version=VERSION,
        perturbations=perturb.VERSION,
        seed=config.seed,
        wanted=config.pairs,
        splits=config.splits,
        least_zipf=config.least_zipf,
        least_similarity=config.least_similarity,
        similar=config.similar,
        similarity=similarity,
        wordnet_sha256=task.wordnet.sha256 if task.wordnet else None,
        built_licence=_BUILT_LICENCE,
        sources=tuple(sources),
        slices=tuple(records),
        files={},
    )
    return noise, flips, record


def _filled(
    config: PerturbationsConfig,
    name: str,
    perturbation: Perturbation,
    origin: Mapping[str, Origin],
    screen: Screen,
) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a slice, of the corpora and then built, and the candidates left out."""
    rejected: Counter[str] = Counter()
    pairs: list[Pair] = []
    for texts in (origin, backfill.sentences(name, config.seed)):
        found = sentences.candidates(texts, name, perturbation, seed=config.seed)
        pairs += fill(found, config.pairs - len(pairs), screen, rejected)
    lines = [
        dataclasses.replace(pair, **origin[pair.text]._asdict())
        if pair.text in origin
        else dataclasses.replace(pair, source=BUILT, frame=backfill.FRAMES[name])
        for pair in pairs
    ]
    return lines, rejected

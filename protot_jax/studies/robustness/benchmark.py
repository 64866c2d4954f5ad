"""Writes the perturbation and the intervention benchmark: pairs of sentences from your corpora.

    iaj protot perturb --workdir=runs/benchmark
    iaj protot perturb --corpus=wiki --corpus=dialogue:talks.jsonl --corpus=news:FOLDER \
        --wordnet=/usr/share/wordnet --workdir=runs/benchmark

After Prototype Transformer, appendix A.5. Sentences of the corpora, each `KIND:SOURCE`, are mixed
in equal parts. The kind says which are taken: text (the default) has sentences of 5 to 20 words, of
which at most 8,000 and half of the mix are taken from one corpus; dialogue of 3 to 15 words; news
the first sentence of a document, of 5 to 20 words. A source is sotu, wiki, wikitext2, or a file or
folder of .txt, .jsonl or .parquet. A source is cut into documents and splits as the training
commands cut it by default, and sentences are of its validation and test splits (`--splits`), none
of five words or more that stands word for word in a training document of any source
(`held_out.py`). Every slice is filled with pairs that pass the checks (`screening.py`), if need be
from built sentences (`backfill.py`). Into `--workdir` it writes

    perturbation_benchmark.jsonl   meaning kept: slice, text, perturbed, source, split (or frame)
    intervention_benchmark.jsonl   gender, negation or number flipped: slice, text, perturbed, frame
    benchmark.json                 sources with licences and sha256, splits, checks, counts, sha256

`iaj protot robustness --sentences=FILE` measures models on either. The same command writes the same
bytes. The similarity needs `iaj fetch minilm`, plurals `iaj fetch inflections`.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from lm_jax import assets
from lm_jax.console import cli, terminal
from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.run import stop
from lm_jax.run.files import content_digest, file_digest, write_json, write_text
from lm_jax.run.finished import NO_INPUTS, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import Count, load_result
from lm_jax.run.settings import CommandOptions, Flag, at_least
from lm_jax.run.workdir import open_workdir
from lm_jax.text import corpora
from lm_jax.text.preparation import CorpusConfig
from lm_jax.text.splits import SPLITS, split_of, split_point
from protot_jax.studies.robustness import (
    backfill,
    held_out,
    lists,
    meaning,
    perturb,
    sentences,
)
from protot_jax.studies.robustness import pairs as pairs_of
from protot_jax.studies.robustness.screening import REASONS, Screen, counted, fill, whole_sentence
from protot_jax.studies.robustness.sentences import KINDS, Pair
from protot_jax.studies.robustness.settings import NOISE, PERTURBATIONS
from protot_jax.studies.robustness.similarity import Encoder, similarities

NOISE_FILE = "perturbation_benchmark.jsonl"
MEANING_FILE = "intervention_benchmark.jsonl"
RECORD = "benchmark.json"
NAME: Literal["protot_jax.robustness.benchmark"] = "protot_jax.robustness.benchmark"
VERSION: Literal[2] = 2
PAPER_SLICES = tuple(name for name in NOISE if name != "typo_any")
BUILT = "built"
_MOST_TEXT = 8_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
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

    corpus: Annotated[tuple[str, ...], Flag(repeated=True)] = ("sotu", "wiki")
    field: str = "text"
    licence: str = ""
    slices: tuple[str, ...] = ()
    pairs: Annotated[int, at_least(1)] = 500
    mix: Annotated[int, at_least(1)] = 30_000
    splits: tuple[str, ...] = ("validation", "test")
    seed: Annotated[int, at_least(0)] = 42
    wordnet: Path | None = None
    least_zipf: float = 3.0
    least_similarity: float = 0.75
    similar: tuple[str, ...] = ("synonym",)


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus of the benchmark.

    Attributes:
      kind: of `sentences.KINDS`.
      version: of the asset's package; null for files of the user's.
      files_sha256: by file name.
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
    """`benchmark.json`: all that decides the bytes of the two files, and their counts.

    Attributes:
      perturbations: version of the generators.
      wanted: pairs of a slice.
      splits: splits that sentences were drawn from.
      similarity: "measured", or why not.
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


def parse_corpus(text: str) -> tuple[str, str]:
    """Kind and source of "KIND:SOURCE"; the kind is text where none is named.

    Raises:
      UsageError: there is no source.
    """
    kind, _, source = text.partition(":")
    if kind not in KINDS:
        kind, source = "text", text
    if not source:
        raise UsageError(f"--corpus={text!r} names no source; write it as {kind}:FOLDER")
    return kind, source


class Origin(NamedTuple):
    """Where a sentence of the mix is from: the name of its source, and the split there."""

    source: str
    split: str


def draw(options: Options, counts: Counter[str]) -> tuple[dict[str, Origin], list[Source]]:
    """The origin of every sentence of the mix, in random order, and the record of every corpus.

    Words of the corpora are added to `counts`.

    Raises:
      BadInputError: a corpus cannot be read, or has no such sentence.
    """
    # A source may be of two kinds.
    mix: dict[tuple[str, str], list[tuple[str, str]]] = {}
    fragments: dict[tuple[str, str], int] = {}
    documents: dict[str, Counter[str]] = {}
    training: list[str] = []
    for kind, source in map(parse_corpus, options.corpus):
        stop.check("while sampling sentences")
        share = max(1, options.mix // len(options.corpus))
        if kind == "text":
            share = min(share, _MOST_TEXT, max(1, options.mix // 2))
        again = source in documents
        texts, documents[source] = _texts(source, options, Counter() if again else counts)
        drawn: dict[str, str] = {}
        for split in options.splits:
            # Each split gives its part, so that a small one is not left out by chance.
            of_split = sentences.sample(texts[split], share, options.seed, KINDS[kind])
            drawn |= dict.fromkeys(of_split, split) | drawn
        order = np.random.default_rng(options.seed).permutation(len(drawn))
        known = list(drawn.items())
        chosen = [known[i] for i in order[:share]]
        mix[kind, source] = [one for one in chosen if whole_sentence(one[0])]
        fragments[kind, source] = len(chosen) - len(mix[kind, source])
        if "train" not in options.splits and not again:
            training += texts["train"]
    trained = held_out.found((text for found in mix.values() for text, _ in found), training)
    records, flat = [], []
    for kind, source in map(parse_corpus, options.corpus):
        kept = [one for one in mix[kind, source] if one[0] not in trained]
        if not kept:
            raise BadInputError(
                f"{source} has no whole sentence of {KINDS[kind].shortest} to "
                f"{KINDS[kind].longest} words in {', '.join(options.splits)} that its training "
                "text has not; name another corpus, or more splits by --splits"
            )
        licence, version = _licence(source, options.licence)
        # The files say nothing of the machine that made them.
        name = Path(source).name
        cut = dataclasses.replace(held_out.heldout_corpus(source, options.field), source=name)
        flat += [(text, Origin(name, split)) for text, split in kept]
        records.append(
            Source(
                name,
                kind,
                licence,
                version,
                corpora.hashes(source),
                len(kept),
                fragments[kind, source],
                cut,
                dict(documents[source]),
                len(mix[kind, source]) - len(kept),
            )
        )
    origin: dict[str, Origin] = {}
    for i in np.random.default_rng(options.seed).permutation(len(flat)):
        origin.setdefault(*flat[i])
    return origin, records


def _texts(
    source: str, options: Options, counts: Counter[str]
) -> tuple[dict[str, list[str]], Counter[str]]:
    """The documents of a source by split, and their number; counts their words."""
    cut = held_out.heldout_corpus(source, options.field)
    documents = corpora.documents(source, unit=cut.unit, words=cut.words, field=cut.field)
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    usable = (text for _, text in corpora.usable(documents, Counter()))
    for text in counted(usable, counts):
        texts[split_of(split_point(text.encode(), cut.seed), cut.splits)].append(text)
    return texts, Counter({split: len(found) for split, found in texts.items()})


def _licence(source: str, of_files: str) -> tuple[str, str | None]:
    if source in assets.entries():
        asset = assets.entry(source)
        return asset.data_licence, asset.version
    return of_files or "not stated", None


def make(
    options: Options, wordnet: lists.WordNet | None
) -> tuple[list[Pair], list[Pair], Benchmark]:
    """Pairs of both files, each with its source, and the record without the files' digests.

    Raises:
      UsageError: an unknown slice.
      BadInputError: a corpus cannot be used, or a slice that was named needs data that are missing.
    """
    for flag, names in (("slices", options.slices), ("similar", options.similar)):
        for name in names:
            if name not in PERTURBATIONS:
                raise UsageError(
                    f"--{flag}: {name!r} is none of {', '.join(PERTURBATIONS)}"
                    f"{nearest(name, PERTURBATIONS)}"
                )
    for split in options.splits:
        if split not in SPLITS:
            raise UsageError(
                f"--splits: {split!r} is none of {', '.join(SPLITS)}{nearest(split, SPLITS)}"
            )
    wanted = options.slices or PAPER_SLICES
    made, skipped = pairs_of.perturbations(wanted, wordnet, named=bool(options.slices))
    encoder, similarity = None, "measured"
    try:
        encoder = Encoder()
    except BadInputError as error:
        similarity = str(error)
    counts: Counter[str] = Counter()
    origin, sources = draw(options, counts)
    screen = Screen(counts, options.least_zipf, encoder, options.least_similarity, options.similar)
    noise, records = [], []
    for name, perturbation in made.items():
        stop.check("while perturbing sentences")
        rejected: Counter[str] = Counter()
        pairs: list[Pair] = []
        for texts in (origin, backfill.sentences(name, options.seed)):
            found = sentences.candidates(texts, name, perturbation, seed=options.seed)
            pairs += fill(found, options.pairs - len(pairs), screen, rejected)
        lines = [
            dataclasses.replace(pair, **origin[pair.text]._asdict())
            if pair.text in origin
            else dataclasses.replace(pair, source=BUILT, frame=backfill.FRAMES[name])
            for pair in pairs
        ]
        noise += lines
        records.append(_slice(name, lines, options.pairs, rejected, encoder))
    records += [Slice(one.name, 0, 0, 0, 0, 0, {}, {}, None, None, one.reason) for one in skipped]
    flips = [
        dataclasses.replace(pair, source=BUILT)
        for pair in sentences.flipped(options.pairs, options.seed)
    ]
    for name in meaning.SLICES:
        own = [pair for pair in flips if pair.slice == name]
        records.append(_slice(name, own, options.pairs, Counter(), encoder))
    record = Benchmark(
        schema=NAME,
        version=VERSION,
        perturbations=perturb.VERSION,
        seed=options.seed,
        wanted=options.pairs,
        splits=options.splits,
        least_zipf=options.least_zipf,
        least_similarity=options.least_similarity,
        similar=options.similar,
        similarity=similarity,
        wordnet_sha256=wordnet.sha256 if wordnet else None,
        built_licence="sentences of the source 'built' are under the licence of this package",
        sources=tuple(sources),
        slices=tuple(records),
        files={},
    )
    return noise, flips, record


def _slice(
    name: str,
    pairs: Sequence[Pair],
    wanted: int,
    rejected: Counter[str],
    encoder: Encoder | None,
) -> Slice:
    both = [(pair.text, pair.perturbed) for pair in pairs]
    cosines = similarities(encoder, both) if encoder and both else None
    distances = [sentences.edit_distance(*each) for each in both]
    lacking = "the corpora and the built sentences have no more" if len(pairs) < wanted else ""
    return Slice(
        name=name,
        pairs=len(pairs),
        unique_pairs=len({(a.casefold(), b.casefold()) for a, b in both}),
        texts=len({text for text, _ in both}),
        built=sum(pair.source == BUILT for pair in pairs),
        frames=len({pair.frame for pair in pairs if pair.frame}),
        splits=dict(sorted(Counter(pair.split for pair in pairs if pair.split).items())),
        rejected={reason: rejected[reason] for reason in REASONS if rejected[reason]},
        similarity=None if cosines is None else float(cosines.mean()),
        distance=float(np.mean(distances)) if distances else None,
        missing=lacking,
    )


def write(options: Options, wordnet: lists.WordNet | None, folder: Path) -> None:
    """Makes the benchmark and writes the three files."""
    noise, flips, record = make(options, wordnet)
    for name, lines in ((NOISE_FILE, noise), (MEANING_FILE, flips)):
        text = "".join(f"{json.dumps(pair.row(), ensure_ascii=False)}\n" for pair in lines)
        write_text(folder / name, text)
    files = {name: file_digest(folder / name) for name in (NOISE_FILE, MEANING_FILE)}
    write_json(folder / RECORD, dataclasses.replace(record, files=files))


def format_benchmark(record: Benchmark) -> str:
    """Counts by slice for a terminal."""
    heads = [
        *("slice", "pairs", "unique", "built", "frames", "rejected", "similarity"),
        "edit distance",
    ]
    rows = [
        [
            one.name,
            *map(str, (one.pairs, one.unique_pairs, one.built, one.frames)),
            str(sum(one.rejected.values())),
            "–" if one.similarity is None else f"{one.similarity:.3f}",
            "–" if one.distance is None else f"{one.distance:.2f}",
        ]
        for one in record.slices
    ]
    lines = [terminal.format_table(heads, rows, left=(0,)), ""]
    lines += [f"{one.name}: {one.missing}" for one in record.slices if one.missing]
    if record.similarity != "measured":
        lines.append(f"similarity is not measured: {record.similarity}")
    lines += [
        f"{one.source}: {one.sentences} sentences of {', '.join(record.splits)}, {one.trained} "
        f"left out that stand in training text; {one.licence}"
        for one in record.sources
    ]
    return "\n".join(lines)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    # What cannot be read is refused before a folder is made.
    hashes = [corpora.hashes(parse_corpus(name)[1]) for name in options.corpus]
    wordnet = lists.WordNet(options.wordnet) if options.wordnet else None
    given = {"wordnet": wordnet.sha256 if wordnet else None, "files_sha256": content_digest(hashes)}
    config = dataclasses.asdict(options) | given
    with open_workdir(arguments.folder, config, resume=arguments.resume) as work:
        # The settings have the digests of all files.
        if done := finish_time(work.path, NO_INPUTS):
            print(f"finished {done}")
        else:
            write(options, wordnet, work.path)
            record = load_result(work.path / RECORD, Benchmark)
            data = {name: str(entry["sha256"]) for name, entry in record.files.items()}
            start = collect_provenance(seeds={"benchmark": options.seed}, data=data)
            record_provenance(work.path, start)
            mark_finished(work.path, NO_INPUTS)
        print(format_benchmark(load_result(work.path / RECORD, Benchmark)))
        print(work.path / NOISE_FILE)
        print(work.path / MEANING_FILE)


if __name__ == "__main__":
    cli.app(main, options=Options)

"""The robustness experiment: pairs, models, rows kept as they are measured, and the summary."""

from collections import Counter
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import re
from typing import Any

import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.run import progress, stop
from lm_jax.run.files import content_digest, to_jsonable
from lm_jax.run.rows import RowStore
from lm_jax.text.preparation import CorpusConfig
from protot_jax.mixers import edits
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.studies.interventions.experiment import SubjectModel
from protot_jax.studies.robustness import (
    held_out,
    lists,
    meaning,
    mediation,
    perturb,
    results,
    sentences,
    summary,
)
from protot_jax.studies.robustness.measure import encode, measure
from protot_jax.studies.robustness.results import Kind, Model, RobustnessReport, SliceResult
from protot_jax.studies.robustness.sentences import Pair
from protot_jax.studies.robustness.similarity import Encoder, similarities

SHARDS = "shards"
NOISE = (
    *("abbreviation", "contraction", "morphology", "punctuation", "spelling", "synonym"),
    *("typo", "typo_any"),
)
# Made where they are asked for by name.
OPTIONAL = ("morphology_any", "synonym_pos")
PERTURBATIONS = (*NOISE, *OPTIONAL)
DEFAULT = (*NOISE, *meaning.SLICES)
SLICES = (*PERTURBATIONS, *meaning.SLICES)
# A source of more sentences than are wanted of a slice, which has no place in most of them.
_SENTENCES = 20
_BATCH = 16


@dataclasses.dataclass(frozen=True)
class RobustnessConfig:
    """Everything that determines the results; saved in `config.json`.

    Attributes:
      models: name, seed, step and digest of each.
      sentences: name of a file or of a corpus, and the sha256 of the file.
      slices: the slices that were asked for; empty for all of `DEFAULT`.
      pairs: greatest number of pairs of a slice.
      seed: of everything that is drawn.
      wordnet_sha256: of `index.sense`; null without WordNet.
      least_similarity: null if similarity is not measured.
      held: the prototypes that are held, each `(layer, prototype)`; empty for all.
      version: of the perturbations.
      released_clamp: measure the clamp of the released code too; saved only where it is true.
    """

    models: tuple[str, ...]
    sentences: str
    sentences_sha256: str | None
    slices: tuple[str, ...] = ()
    pairs: int = 100
    seed: int = 0
    wordnet_sha256: str | None = None
    least_similarity: float | None = None
    held: tuple[tuple[int, int], ...] = ()
    version: int = perturb.VERSION
    released_clamp: bool = False

    def __post_init__(self) -> None:
        for name in self.slices:
            if name not in SLICES:
                raise UsageError(
                    f"slices: {name!r} is none of {', '.join(SLICES)}{nearest(name, SLICES)}"
                )

    def stored(self) -> dict[str, Any]:
        """The content of `config.json`, which by default is that of folders from before an option.

        A folder without the field resumes, and its shards keep their fingerprint.
        """
        return {
            name: value
            for name, value in to_jsonable(self).items()
            if name != "released_clamp" or value
        }


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of an experiment.

    Attributes:
      pairs: those that are measured, slice by slice.
      similarity: of each; None if it was not measured.
      dissimilar: by slice, how many were left out.
      skipped: slices without pairs.
      trained: by slice, how many pairs were left out because a model was trained on one of their
        sentences.
      models: of each model, how many sentences stand in its training text, and why that is not
        known.
    """

    pairs: tuple[Pair, ...]
    similarity: tuple[float, ...] | None
    dissimilar: dict[str, int]
    skipped: tuple[results.SkippedSlice, ...]
    trained: dict[str, int]
    models: tuple[results.TrainedOn, ...]


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


def check_clamps(subjects: Sequence[SubjectModel], config: RobustnessConfig) -> None:
    """Checks that the models with prototypes have those that are held.

    Raises:
      UsageError: one of them has not, or no model has prototypes and a clamp was asked for.
    """
    own = [one.model for one in subjects if isinstance(one.model.mixer, PrototypeMixer)]
    for name, asked in (("held", config.held), ("released_clamp", config.released_clamp)):
        if asked and not own:
            raise UsageError(f"{name}: none of the runs has prototypes; name a run of 'protot'")
    for model in own:
        for layer, prototype in config.held:
            edits.check(model.params, layer=layer, prototype=prototype)


def make_pairs(
    subjects: Sequence[SubjectModel],
    given: sentences.Given | None,
    wordnet: lists.WordNet | None,
    config: RobustnessConfig,
) -> Pairs:
    """Samples sentences, or takes those of the user, and perturbs them.

    Pairs of a sentence that stands in the training text of any of the models are left out.

    Raises:
      BadInputError: the corpus of the first run cannot be read, a slice that was asked for by name
        needs data that are not here, or there is no pair.
    """
    # A slice of which the file has pairs is measured on those.
    own = {pair.slice for pair in given.pairs} if given else set()
    wanted = [name for name in config.slices or DEFAULT if name not in own]
    if given and not given.sentences:
        wanted = [name for name in wanted if name not in PERTURBATIONS]
    made, skipped = perturbations(wanted, wordnet, named=bool(config.slices))
    pairs: list[Pair] = []
    if given is None and made:
        texts = sentences.sample_validation(
            subjects[0].model.config.corpus, _SENTENCES * config.pairs, config.seed
        )
    else:
        texts = given.sentences if given else ()
    found = sentences.perturbed(texts, made, count=config.pairs, seed=config.seed)
    for name in made:
        if texts and not any(pair.slice == name for pair in found):
            skipped.append(
                results.SkippedSlice(name, f"none of {len(texts)} sentences has a place for it")
            )
    pairs += found
    pairs += given.pairs if given else ()
    flips = sentences.flipped(config.pairs, config.seed)
    pairs += [pair for pair in flips if pair.slice in wanted]
    pairs, trained, of_models = _without_trained(subjects, pairs)
    for name in trained.keys() - {pair.slice for pair in pairs}:
        reason = f"a model was trained on a sentence of each of its {trained[name]} pairs"
        skipped.append(results.SkippedSlice(name, reason))
    similarity, dissimilar = None, {}
    if config.least_similarity is not None and pairs:
        encoder = Encoder()
        cosines = similarities(encoder, [(pair.text, pair.perturbed) for pair in pairs])
        keep = [
            pair.slice in meaning.SLICES or cosine >= config.least_similarity
            for pair, cosine in zip(pairs, cosines, strict=True)
        ]
        for pair, kept in zip(pairs, keep, strict=True):
            dissimilar[pair.slice] = dissimilar.get(pair.slice, 0) + (not kept)
        pairs = [pair for pair, kept in zip(pairs, keep, strict=True) if kept]
        similarity = tuple(float(x) for x, kept in zip(cosines, keep, strict=True) if kept)
    if not pairs:
        known = f" ({sum(trained.values())} stand in training text)" if trained else ""
        raise BadInputError(
            f"there is no pair to measure{known}; give more sentences or other slices"
        )
    return Pairs(tuple(pairs), similarity, dissimilar, tuple(skipped), trained, of_models)


def _without_trained(
    subjects: Sequence[SubjectModel], pairs: Sequence[Pair]
) -> tuple[list[Pair], dict[str, int], tuple[results.TrainedOn, ...]]:
    """The pairs that no model was trained on, the others by slice, and what each model has."""
    # Both texts, for a perturbed one may be the one that stands in a corpus.
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.text, pair.perturbed)))
    by_corpus: dict[CorpusConfig, held_out.Trained] = {}
    found = []
    for one in subjects:
        # Models of one text may have tokenizers of their own.
        corpus = dataclasses.replace(one.model.config.corpus, vocab_size=0)
        if corpus not in by_corpus:
            by_corpus[corpus] = held_out.trained_on(texts, corpus)
        found.append(by_corpus[corpus])
    gone = frozenset[str]().union(*(one.texts for one in found))
    kept = [pair for pair in pairs if not {pair.text, pair.perturbed} & gone]
    left_out = Counter(pair.slice for pair in pairs if {pair.text, pair.perturbed} & gone)
    models = tuple(results.TrainedOn(len(one.texts), one.unknown) for one in found)
    return kept, dict(left_out), models


def perturbations(
    wanted: Sequence[str], wordnet: lists.WordNet | None, *, named: bool
) -> tuple[dict[str, perturb.Perturbation], list[results.SkippedSlice]]:
    """The wanted ones of `PERTURBATIONS` by name, and those whose data are missing.

    Raises:
      BadInputError: data are missing, and the slices were asked for by name.
    """
    made, reasons = perturb.without_data(), {}
    if wordnet is not None:
        made |= perturb.of_wordnet(wordnet)
    else:
        missing_words = "WordNet is missing; name a folder with its index.sense by --wordnet"
        reasons |= dict.fromkeys(("synonym", "synonym_pos"), missing_words)
    try:
        made |= perturb.of_inflections()
    except BadInputError as error:
        reasons["morphology"] = str(error)
    missing = {name: reason for name, reason in reasons.items() if name in wanted}
    if named and missing:
        name, reason = next(iter(missing.items()))
        raise BadInputError(f"the slice {name} cannot be made: {reason}")
    skipped = [results.SkippedSlice(name, reason) for name, reason in missing.items()]
    return {name: made[name] for name in PERTURBATIONS if name in wanted and name in made}, skipped


def perform(
    subjects: Sequence[SubjectModel],
    made: Pairs,
    config: RobustnessConfig,
    folder: Path,
    *,
    given: bool,
) -> tuple[RobustnessReport, pa.Table]:
    """Measures every model on every pair; returns `summary.json` and the rows of `rows.parquet`.

    What is measured is kept below `folder`, so that the same call again does only the rest.

    Raises:
      BadInputError: every pair is too long for one of the models.
      StoppedError: the command was asked to stop.
    """
    encoded = [encode(one.model, made.pairs, config.seed) for one in subjects]
    shortest = min(one.model.config.context for one in subjects)
    fits = [max(own[i].length for own in encoded) <= shortest for i in range(len(made.pairs))]
    if not any(fits):
        raise BadInputError(
            f"every sentence has more than the {shortest} tokens that the models read; give "
            "shorter ones"
        )
    batches = _batches(made.pairs, fits)
    units = [(m, name, k) for m in range(len(subjects)) for name, k in batches]
    longest = [
        max(each.length for each, fit in zip(own, fits, strict=True) if fit) for own in encoded
    ]
    digest = content_digest(config.stored())
    schema = results.rows(released=config.released_clamp)
    with RowStore(folder / SHARDS, schema, digest) as store:
        done = sum(unit in store for unit in units)
        total = len(units)
        with progress.track("perturbing", total, unit="batches", done=done) as advance:
            for m, name, k in units:
                if (m, name, k) in store:
                    continue
                stop.check("while measuring robustness")
                rows = batches[name, k]
                columns = measure(
                    subjects[m].model,
                    [encoded[m][i] for i in rows],
                    shape=(_BATCH, longest[m]),
                    chosen=config.held,
                    released=config.released_clamp,
                )
                store.append((m, name, k), columns | _described(subjects[m], m, made, rows))
                advance()
        table = store.read()
    return _report(subjects, made, config, table, given, fits.count(False)), table


def _batches(pairs: Sequence[Pair], fits: Sequence[bool]) -> dict[tuple[str, int], list[int]]:
    """Indices of the pairs of every batch, by slice and number."""
    by_slice: dict[str, list[int]] = {}
    for i, pair in enumerate(pairs):
        if fits[i]:
            by_slice.setdefault(pair.slice, []).append(i)
    return {
        (name, start // _BATCH): indices[start : start + _BATCH]
        for name, indices in by_slice.items()
        for start in range(0, len(indices), _BATCH)
    }


def _described(
    subject: SubjectModel, model: int, made: Pairs, rows: Sequence[int]
) -> dict[str, list]:
    pairs = [made.pairs[i] for i in rows]
    return {
        "model": [model] * len(rows),
        "run": [subject.run] * len(rows),
        "seed": [subject.model.seed] * len(rows),
        "slice": [pair.slice for pair in pairs],
        "text": [pair.text for pair in pairs],
        "perturbed": [pair.perturbed for pair in pairs],
        **{name: [getattr(pair, name) for pair in pairs] for name in ("frame", "source", "split")},
        "distance": [sentences.edit_distance(pair.text, pair.perturbed) for pair in pairs],
        "similarity": [made.similarity[i] if made.similarity else None for i in rows],
    }


def _report(
    subjects: Sequence[SubjectModel],
    made: Pairs,
    config: RobustnessConfig,
    table: pa.Table,
    given: bool,
    too_long: int,
) -> RobustnessReport:
    columns = {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
    order = list(dict.fromkeys(pair.slice for pair in made.pairs))
    slices = [
        _slice(name, columns, len(subjects), made, config)
        for name in order
        if (columns["slice"] == name).any()
    ]
    return RobustnessReport(
        schema=results.SCHEMA,
        version=results.VERSION,
        settings=results.Settings(
            sentences=config.sentences,
            given=given,
            pairs=config.pairs,
            seed=config.seed,
            least_similarity=config.least_similarity,
            held=tuple(f"L{layer}P{prototype}" for layer, prototype in config.held),
            floor=mediation.FLOOR,
            too_long=too_long,
        ),
        models=tuple(map(_model, subjects, made.models)),
        slices=summary.corrected(slices),
        skipped=made.skipped,
    )


def _model(subject: SubjectModel, trained: results.TrainedOn) -> Model:
    model = subject.model
    mixer = model.mixer if isinstance(model.mixer, PrototypeMixer) else None
    return Model(
        run=subject.run,
        kind=model.config.model,
        seed=model.seed,
        step=model.step,
        corpus=model.config.corpus.source,
        layers=model.cfg.num_layers,
        hidden_size=model.cfg.hidden_size,
        vocab_size=model.cfg.vocab_size,
        prototypes=None if mixer is None else mixer.num_prototypes,
        trained=trained,
    )


def _slice(
    name: str, columns: summary.Columns, models: int, made: Pairs, config: RobustnessConfig
) -> SliceResult:
    by_model = [
        {
            key: values[(columns["slice"] == name) & (columns["model"] == m)]
            for key, values in columns.items()
        }
        for m in range(models)
    ]
    first = by_model[0]
    kind: Kind = (
        "noise" if name in PERTURBATIONS else "meaning" if name in meaning.SLICES else "given"
    )
    return SliceResult(
        name=name,
        kind=kind,
        pairs=len(first["text"]),
        sentences=len(np.unique(first["text"])),
        distance=float(first["distance"].mean()),
        similarity=float(first["similarity"].mean()) if made.similarity else None,
        frames=len(np.unique(first["frame"][first["frame"] != ""])),
        dissimilar=made.dissimilar.get(name, 0),
        trained=made.trained.get(name, 0),
        example=(str(first["text"][0]), str(first["perturbed"][0])),
        models=tuple(summary.measured(rows, seed=config.seed) for rows in by_model),
        comparison=summary.compared([rows["js"] for rows in by_model], summary.clusters(first)),
    )

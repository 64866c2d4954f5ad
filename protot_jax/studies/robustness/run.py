"""Makes the pairs and measures every model on them.

Besides what every study has, the work folder holds

    pairs.jsonl      all pairs, which `--sentences` reads
    shards/          rows, kept as they are measured
    rows.parquet     a row for each pair and model (`results.py`)
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import content_digest, file_digest
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.rows import Unit
from lm_jax.study import Opened, Work
from lm_jax.text.corpora import corpus_inputs
from protot_jax.mixers import edits
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.studies.interventions.models import SubjectModel
from protot_jax.studies.robustness import lists, numbers, perturb, results, sentences
from protot_jax.studies.robustness.measure import encode, measure
from protot_jax.studies.robustness.pairs import Pairs, make_pairs
from protot_jax.studies.robustness.results import RobustnessReport
from protot_jax.studies.robustness.sentences import Given, Pair
from protot_jax.studies.robustness.settings import RobustnessConfig, parse_held
from protot_jax.training.run_options import load_each
from protot_jax.training.saved_run import run_names

PAIRS = "pairs.jsonl"
_BATCH = 16


class Task(NamedTuple):
    """The models, what a file of sentences has, WordNet, and the prototypes that are held."""

    subjects: list[SubjectModel]
    given: Given | None
    wordnet: lists.WordNet | None
    held: tuple[tuple[int, int], ...]


def inputs(config: RobustnessConfig) -> Opened:
    """The models, the text and WordNet; loads them.

    Raises:
      UsageError: no run, one named twice, a seed that a run does not have, or a prototype that no
        model has.
      BadInputError, CorruptError: a run, the sentences or WordNet cannot be used.
    """
    given = sentences.read(Path(config.sentences)) if config.sentences else None
    wordnet = lists.WordNet(Path(config.wordnet)) if config.wordnet else None
    held = parse_held(config.held)
    loaded = load_each(config.run, seed=config.run_seed, best=config.checkpoint == "best")
    folders, models = zip(*loaded, strict=True)
    subjects = list(map(SubjectModel, run_names(folders, models), models))
    check_clamps(subjects, held, released=config.released_clamp)
    found = {str(one): one.model.identity.text for one in subjects}
    found |= text_inputs(config, subjects[0])
    return Opened(found | perturb.inputs(wordnet), Task(subjects, given, wordnet, held))


def text_inputs(config: RobustnessConfig, first: SubjectModel) -> Inputs:
    """The file of sentences, or the corpus of the first model where none is given."""
    if config.sentences:
        return file_inputs({"sentences": config.sentences})
    return corpus_inputs({"corpus": first.model.config.corpus.source})


def check_clamps(
    subjects: Sequence[SubjectModel], held: Sequence[tuple[int, int]], *, released: bool
) -> None:
    """Checks that the models with prototypes have those that are held.

    Raises:
      UsageError: one of them has not, or no model has prototypes and a clamp was asked for.
    """
    own = [one.model for one in subjects if isinstance(one.model.mixer, PrototypeMixer)]
    for name, asked in (("held", held), ("released_clamp", released)):
        if asked and not own:
            raise UsageError(f"{name}: none of the runs has prototypes; name a run of 'protot'")
    for model in own:
        for layer, prototype in held:
            edits.check(model.params, layer=layer, prototype=prototype)


def fingerprint(config: RobustnessConfig, task: Task) -> str:
    """Digest of everything that decides the rows; of released code's clamp where it is asked for.

    It is that of folders from before there was a frame, whose rows stay.
    """
    own: dict[str, Any] = {
        "models": [f"{one}, {one.model.sha256[:16]}" for one in task.subjects],
        "sentences": source(config, task),
        "sentences_sha256": (
            file_digest(Path(config.sentences))["sha256"] if config.sentences else None
        ),
        "slices": list(config.slices),
        "pairs": config.pairs,
        "seed": config.seed,
        "wordnet_sha256": task.wordnet.sha256 if task.wordnet else None,
        "least_similarity": config.least_similarity,
        "held": [list(each) for each in task.held],
        "version": perturb.VERSION,
    }
    return content_digest(own | {"released_clamp": True} if config.released_clamp else own)


def source(config: RobustnessConfig, task: Task) -> str:
    """Name of the file of sentences, or of the corpus that they are sampled from."""
    if config.sentences:
        return Path(config.sentences).name
    return task.subjects[0].model.config.corpus.source


def perform(config: RobustnessConfig, work: Work) -> RobustnessReport:
    """Measures every model on every pair that has no row yet.

    Raises:
      BadInputError: there is no pair, or every one is too long for one of the models.
      StoppedError: the command was asked to stop.
    """
    task: Task = work.loaded
    for subject in task.subjects:
        subject.model.warn_of_joining()
    made = make_pairs(task.subjects, task.given, task.wordnet, config)
    sentences.write(work.path / PAIRS, made.pairs)
    work.record(
        data={"pairs": file_digest(work.path / PAIRS)["sha256"]},
        tokenizer=task.subjects[0].model.tokenizer.sha256,
    )
    encoded = [encode(one.model, made.pairs, config.seed) for one in task.subjects]
    shortest = min(one.model.config.context for one in task.subjects)
    fits = [max(own[i].length for own in encoded) <= shortest for i in range(len(made.pairs))]
    if not any(fits):
        raise BadInputError(
            f"every sentence has more than the {shortest} tokens that the models read; give "
            "shorter ones"
        )
    longest = [
        max(each.length for each, fit in zip(own, fits, strict=True) if fit) for own in encoded
    ]
    batches = _batches(made.pairs, fits)
    plan: dict[Unit, tuple[int, list[int]]] = {
        (m, name, k): (m, rows)
        for m in range(len(task.subjects))
        for (name, k), rows in batches.items()
    }

    def batch(unit: tuple[int, list[int]]) -> dict[str, Any]:
        m, rows = unit
        columns = measure(
            task.subjects[m].model,
            [encoded[m][i] for i in rows],
            shape=(_BATCH, longest[m]),
            chosen=task.held,
            released=config.released_clamp,
        )
        return columns | _described(task.subjects[m], m, made, rows)

    schema = results.rows(released=config.released_clamp)
    kept = dataclasses.replace(work, fingerprint=fingerprint(config, task))
    return numbers.summarise(
        config,
        task.subjects,
        made,
        kept.units("rows", schema, plan, batch, task="perturbing", noun="batches"),
        sentences=source(config, task),
        held=task.held,
        too_long=fits.count(False),
    )


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

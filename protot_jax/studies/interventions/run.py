"""Chooses the prototype, measures it, and repeats that in other seeds.

1. Compute write gates over validation text, for every model (`gates.py`).
2. Take the prototype that the user named, or the first in the ranking by words.
3. In other seeds, take the prototype that the matching assigns to it (`matching.py`).
4. Measure each with its controls (`effects.py`), and collect the results (`numbers.py`).

Besides what every study has, the work folder holds

    interventions.parquet    a row for each sentence, prototype, intervention and draw

With several concepts each has such a folder within it, and the summary compares their effects
(`comparison.py`).
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from lm_jax.assets import published
from lm_jax.report.markup import slug
from lm_jax.run import progress
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.tables import write_table
from lm_jax.study import Opened, Work, frame
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import MANIFEST, Prepared, open_prepared
from protot_jax.mixers.edits import check
from protot_jax.studies import interventions
from protot_jax.studies.interventions import comparison, effects, gates, matching, numbers, results
from protot_jax.studies.interventions import sentences as sentence_files
from protot_jax.studies.interventions.models import SubjectModel, load_subject_models
from protot_jax.studies.interventions.results import (
    Comparison,
    InterventionReport,
    SeedResult,
    SkippedSentence,
)
from protot_jax.studies.interventions.sentences import Sentence
from protot_jax.studies.interventions.settings import InterventionConfig
from protot_jax.training.saved_run import DATA, TrainedModel

VALIDATION = "validation"
ROWS = "interventions.parquet"


class Task(NamedTuple):
    """The models, the prepared text, the sentences by concept, and the inputs of the study."""

    subjects: list[SubjectModel]
    data: Prepared
    sentences: Mapping[str | None, list[Sentence]]
    inputs: Inputs


def inputs(config: InterventionConfig) -> Opened:
    """The models, the prepared text and the sentences; loads them.

    Raises:
      UsageError: no sentences are named, an unknown concept, or a seed or a prototype that the run
        does not have.
      BadInputError, CorruptError: a run or the file of sentences cannot be used, a word is not in
        the vocabulary, or none of a concept's occurs in the text.
    """
    # Wrong names are refused before a model is loaded.
    by_concept = {concept: config.sentences_of(concept) for concept in config.concepts}
    subjects = load_subject_models(
        config.run_folder,
        other_runs=[published.resolve(other) for other in config.other_runs],
        seed=config.run_seed,
        best=config.best,
        match_seeds=config.match_seeds,
    )
    first = subjects[0].model
    if config.layer is not None and config.prototype is not None:
        check(first.params, layer=config.layer, prototype=config.prototype)
    data = open_prepared(config.run_folder / DATA, tokenizer=first.tokenizer)
    # The words of every concept are looked for before the first is measured.
    text_NS = _text(data, first, config.gate_rows, config.seed)
    for own in by_concept.values():
        gates.find_words(first, text_NS, config.words_of(own))
    found = text_inputs(config) | {str(each): each.model.identity.text for each in subjects}
    return Opened(found, Task(subjects, data, by_concept, found))


def text_inputs(config: InterventionConfig) -> dict[str, str]:
    """The prepared text and the sentences."""
    prepared = file_inputs({"prepared text": config.run_folder / DATA / MANIFEST})
    return prepared | {"sentences": sentence_files.digest(config.sentences)}


def perform(config: InterventionConfig, work: Work) -> InterventionReport | Comparison:
    """Measures the concept, or each of several in a folder of its own, and compares them."""
    task: Task = work.loaded
    first = task.subjects[0].model
    work.record(
        data={"documents": task.data.manifest["documents_sha256"]},
        tokenizer=first.tokenizer.sha256,
    )
    if len(task.sentences) > 1:
        return comparison.compare(
            [_concept_of_several(config, work, concept) for concept in filter(None, task.sentences)]
        )
    first.warn_of_joining()
    ((concept, own),) = task.sentences.items()
    report, rows = intervene(config, task.subjects, task.data, concept, own)
    write_table(work.path / ROWS, rows)
    return report


def _concept_of_several(config: InterventionConfig, work: Work, concept: str) -> InterventionReport:
    """The study of one concept, in a folder within that of all."""
    task: Task = work.loaded
    together = tuple(filter(None, config.concepts))
    alone = dataclasses.replace(config, concept=(concept,), together=together)
    own = task._replace(sentences={concept: task.sentences[concept]})
    part = dataclasses.replace(work.part(slug(concept)), loaded=own)
    report = frame.run_part(interventions.STUDY, alone, part, task.inputs)
    print(f"report: {frame.report_file(part.path)}")
    return report


def _text(data: Prepared, model: TrainedModel, rows: int, seed: int) -> np.ndarray:
    config = model.config
    # A model of joined rows, where most begin within a document, is read on such rows.
    mode = "pack" if config.examples == "join" else "truncate"
    examples = Examples(data, VALIDATION, context=config.context, mode=mode)
    return gates.sample(examples, rows, seed)


def intervene(
    config: InterventionConfig,
    subjects: Sequence[SubjectModel],
    data: Prepared,
    concept: str | None,
    sentences: Sequence[Sentence],
) -> tuple[InterventionReport, pa.Table]:
    """Measures every model; returns the summary of a concept and the rows of its table.

    Raises:
      BadInputError: no sentence can be used.
      StoppedError: the command was asked to stop.
    """
    first = subjects[0].model
    words = config.words_of(sentences)
    text_NS = _text(data, first, config.gate_rows, config.seed)
    perplexity_NS = None
    if config.perplexity_rows:
        perplexity_NS = _text(data, first, config.perplexity_rows, config.seed)
    read = [gates.over_text(one.model, text_NS, words) for one in subjects]
    if config.layer is None or config.prototype is None:
        at = read[0].ranking[0].layer, read[0].ranking[0].prototype
    else:
        at = config.layer, config.prototype

    steps = sum(
        effects.count_steps(
            one.model,
            draws=config.reinit_draws,
            control_draws=config.used_control_draws,
            controls=config.controls,
            text=perplexity_NS is not None,
        )
        for one in subjects
    )
    findings: list[SeedResult] = []
    tables: list[pa.Table] = []
    skipped: tuple[SkippedSentence, ...] = ()
    with progress.track("intervening", steps, unit="forward passes") as advance:
        for subject, own in zip(subjects, read, strict=True):
            match = None
            if findings:
                match = matching.match(read[0], own, layer=at[0], prototype=at[1])
            layer, prototype = at if match is None else (match.layer, match.prototype)
            measured = effects.measure(
                subject.model,
                sentences,
                layer=layer,
                prototype=prototype,
                draws=config.reinit_draws,
                controls=config.controls,
                control_draws=config.used_control_draws,
                least=config.least_probability,
                all_subtokens=config.all_subtokens,
                seed=config.seed,
                text_NS=perplexity_NS,
                advance=advance,
            )
            findings.append(
                numbers.of_seed(
                    measured,
                    run=subject.run,
                    seed=subject.model.seed,
                    step=subject.model.step,
                    match=match,
                    ranking=own.ranking,
                )
            )
            tables.append(numbers.rows(measured, run=subject.run, seed=subject.model.seed))
            # The same for all models, which share one tokenizer.
            skipped = numbers.skipped(measured)
    result = InterventionReport(
        schema=results.NAME,
        version=results.VERSION,
        model=first.described(results.Model),
        settings=results.Settings(
            concept=concept,
            together=config.together,
            words=words,
            occurrences=dict(read[0].occurrences),
            found=config.layer is None,
            shipped_sentences=not config.sentences,
            all_subtokens=config.all_subtokens,
            least_probability=config.least_probability,
            draws=config.reinit_draws,
            control_draws=config.used_control_draws,
            reinit_seed=config.seed,
            gate_tokens=int(np.count_nonzero(text_NS)),
        ),
        seeds=tuple(findings),
        skipped=skipped,
        replication=numbers.replication(findings),
    )
    return result, pa.concat_tables(tables)

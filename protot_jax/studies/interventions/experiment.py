"""An intervention from end to end: choose the prototype, measure it, repeat it in other seeds.

1. Compute write gates over validation text, for every model (`gates.py`).
2. Take the prototype that the user named, or the first in the ranking by words.
3. In other seeds, take the prototype that the matching assigns to it (`matching.py`).
4. Measure each with its controls (`effects.py`), and collect the results (`summary.py`).
"""

from collections.abc import Callable, Sequence
import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa

from lm_jax.errors import BadInputError, UsageError
from lm_jax.run import progress
from lm_jax.text.examples import Examples
from lm_jax.text.preparation import Prepared, open_prepared
from protot_jax.mixers.edits import check
from protot_jax.studies.interventions import effects, gates, matching, results, summary
from protot_jax.studies.interventions.results import InterventionReport, SeedResult, SkippedSentence
from protot_jax.studies.interventions.sentences import Sentence
from protot_jax.training.saved_run import DATA, TrainedModel, load_run, run_names

VALIDATION = "validation"


@dataclasses.dataclass(frozen=True)
class InterventionConfig:
    """Everything that determines the results; saved in `config.json`.

    Attributes:
      models: name, seed and step of each; the first is the one to intervene on.
      sentences: "shipped", or the name of a file, and its sha256.
      concept: of the sentences; None for all sentences of the file.
      together: the concepts that are tested at once, this one included; empty for a single one.
      words: to rank prototypes by; empty if the prototype is named.
      layer, prototype: the named prototype; None to take the first by the words.
      least_probability: targets below it are excluded.
      all_subtokens: a target is all tokens of the word, not only the first.
      draws, control_draws, reinit_seed: of new vectors.
      controls: whether all other prototypes are measured.
      gate_rows: number of rows of validation text for ranking and matching.
      perplexity_rows: number of rows whose perplexity is measured; 0 for none.
    """

    models: tuple[str, ...]
    sentences: str
    sentences_sha256: str
    concept: str | None
    words: tuple[str, ...]
    layer: int | None
    prototype: int | None
    least_probability: float = 0.01
    all_subtokens: bool = False
    draws: int = 20
    control_draws: int = 5
    controls: bool = True
    reinit_seed: int = 0
    gate_rows: int = 512
    perplexity_rows: int = 32
    together: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.layer is None) != (self.prototype is None):
            raise UsageError("--layer and --prototype go together; give both, or neither")
        if self.layer is None and not self.words:
            raise UsageError("there is no word to choose a prototype by; give --words")


@dataclasses.dataclass(frozen=True)
class SubjectModel:
    """A model with the name of the run it is from."""

    run: str
    model: TrainedModel

    def __str__(self) -> str:
        return f"{self.run}, seed {self.model.seed}, step {self.model.step}"


def load_subject_models(
    run: Path,
    *,
    other_runs: Sequence[Path] = (),
    seed: int | None = None,
    best: bool = True,
    match_seeds: bool = True,
) -> list[SubjectModel]:
    """Loads the model to intervene on, then those to match it with.

    Args:
      run: its work folder.
      other_runs: work folders of further runs, all seeds.
      seed: of the model to intervene on; None for the first seed of the run.
      best: the checkpoints of lowest validation perplexity; false for the last ones.
      match_seeds: whether to load the run's other seeds.

    Raises:
      BadInputError: a folder is not a run with a checkpoint, or has another tokenizer.
      UsageError: a run's model has no prototypes, or not this seed.
    """
    first = load_run(run, seed=seed, best=best)
    others = [(run, other) for other in first.config.seeds if other != first.seed]
    wanted = others if match_seeds else []
    for folder in other_runs:
        own = load_run(folder, best=best)
        wanted += [(folder, each) for each in own.config.seeds]
    models = [first, *(load_run(folder, seed=s, best=best) for folder, s in wanted)]
    names = run_names([run, *(folder for folder, _ in wanted)], models)
    results = list(map(SubjectModel, names, models))
    for subject in results:
        _ = subject.model.prototypes
        if subject.model.tokenizer.sha256 != first.tokenizer.sha256:
            raise BadInputError(
                f"{subject.run} has another tokenizer than {results[0].run}, so their prototypes "
                "cannot be matched; name runs on the same prepared data"
            )
    return results


def prepared(run: Path, subject: SubjectModel) -> Prepared:
    """The prepared data of a run."""
    return open_prepared(run / DATA, tokenizer=subject.model.tokenizer)


def _text(data: Prepared, model: TrainedModel, rows: int, seed: int) -> np.ndarray:
    config = model.config
    # A model of joined rows, where most begin within a document, is read on such rows.
    mode = "pack" if config.examples == "join" else "truncate"
    examples = Examples(data, VALIDATION, context=config.context, mode=mode)
    return gates.sample(examples, rows, seed)


def check_words(data: Prepared, subject: SubjectModel, settings: InterventionConfig) -> None:
    """Checks that the words of an intervention occur in its validation text.

    Raises:
      BadInputError: a word is not in the vocabulary, or none of them occurs.
    """
    text_NS = _text(data, subject.model, settings.gate_rows, settings.reinit_seed)
    gates.find_words(subject.model, text_NS, settings.words)


def perform(
    subjects: Sequence[SubjectModel],
    data: Prepared,
    sentences: Sequence[Sentence],
    settings: InterventionConfig,
) -> tuple[InterventionReport, pa.Table]:
    """Measures every model; returns `intervention.json` and the rows of `interventions.parquet`.

    Raises:
      UsageError: the model does not have the prototype.
      BadInputError: no sentence can be used, or none of the words occurs.
      StoppedError: the command was asked to stop.
    """
    first = subjects[0].model
    if settings.layer is not None and settings.prototype is not None:
        check(first.params, layer=settings.layer, prototype=settings.prototype)
    config, mixer = first.config, first.prototypes
    text_NS = _text(data, first, settings.gate_rows, settings.reinit_seed)
    perplexity_NS = None
    if settings.perplexity_rows:
        perplexity_NS = _text(data, first, settings.perplexity_rows, settings.reinit_seed)
    read = [gates.over_text(one.model, text_NS, settings.words) for one in subjects]
    if settings.layer is None or settings.prototype is None:
        at = read[0].ranking[0].layer, read[0].ranking[0].prototype
    else:
        at = settings.layer, settings.prototype

    steps = sum(
        effects.count_steps(
            one.model,
            draws=settings.draws,
            control_draws=settings.control_draws,
            controls=settings.controls,
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
            measured = _measure(
                subject, sentences, settings, layer, prototype, perplexity_NS, advance
            )
            findings.append(
                summary.of_seed(
                    measured,
                    run=subject.run,
                    seed=subject.model.seed,
                    step=subject.model.step,
                    match=match,
                    ranking=own.ranking,
                )
            )
            tables.append(summary.rows(measured, run=subject.run, seed=subject.model.seed))
            # The same for all models, which share one tokenizer.
            skipped = summary.skipped(measured)
    result = InterventionReport(
        schema=results.NAME,
        version=results.VERSION,
        model=results.Model(
            corpus=config.corpus.source,
            layers=first.cfg.num_layers,
            prototypes=mixer.num_prototypes,
            hidden_size=first.cfg.hidden_size,
            vocab_size=first.cfg.vocab_size,
            shared_routing=mixer.shared_routing,
        ),
        settings=results.Settings(
            concept=settings.concept,
            together=settings.together,
            words=settings.words,
            occurrences=dict(read[0].occurrences),
            found=settings.layer is None,
            shipped_sentences=settings.sentences == "shipped",
            all_subtokens=settings.all_subtokens,
            least_probability=settings.least_probability,
            draws=settings.draws,
            control_draws=settings.control_draws,
            reinit_seed=settings.reinit_seed,
            gate_tokens=int(np.count_nonzero(text_NS)),
        ),
        seeds=tuple(findings),
        skipped=skipped,
        replication=summary.replication(findings),
    )
    return result, pa.concat_tables(tables)


def _measure(
    subject: SubjectModel,
    sentences: Sequence[Sentence],
    settings: InterventionConfig,
    layer: int,
    prototype: int,
    text_NS: np.ndarray | None,
    advance: Callable[[int], None],
) -> effects.Measured:
    return effects.measure(
        subject.model,
        sentences,
        layer=layer,
        prototype=prototype,
        draws=settings.draws,
        controls=settings.controls,
        control_draws=settings.control_draws,
        least=settings.least_probability,
        all_subtokens=settings.all_subtokens,
        seed=settings.reinit_seed,
        text_NS=text_NS,
        advance=advance,
    )

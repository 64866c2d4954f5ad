"""Intervenes on one prototype of a trained model and measures the effect on target words.

    iaj protot intervene --run=runs/speeches --concept=war
    iaj protot intervene --run=runs/speeches --concept=war,Congress,Treasury,Mexico
    iaj protot intervene --run=runs/speeches --sentences=mine.tsv --layer=2 --prototype=5

After Prototype Transformer, appendix A.3. Without `--layer` and `--prototype` the prototype is the
one that most specifically writes the words (`--words`, by default the targets of the sentences).
Every other prototype gets the same interventions as a control, and in other seeds of the run (or
in `--other_runs`) the matching prototype is tested as well. Into `--workdir`, by default a folder
below `interventions` of the run, it writes

    intervention.json       every number of the report (`results.py`)
    interventions.parquet   a row for each sentence, prototype, intervention and draw
    intervention.html       the report, one offline file

With several concepts at once, each has a folder of its own in it, and `comparison.json` and
`comparison.html` compare their effects, with p corrected for their number.

The concepts that come with sentences are women and girls, COVID, New Zealand, mental health (those
of the paper), war, Congress, Treasury, Mexico (for the messages of US presidents), and album,
species, season, County (for introductions of Wikipedia articles). A file of sentences is .jsonl or
.tsv, with concept, target and text.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
import textwrap
from typing import Annotated

from lm_jax.errors import UsageError
from lm_jax.report import slug
from lm_jax.run import cli, terminal
from lm_jax.run.files import file_digest, storage_error, to_jsonable, write_json, write_text
from lm_jax.run.finished import Inputs, file_inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import at_least
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import Resume, open_workdir
from lm_jax.text.preparation import MANIFEST
from protot_jax.studies.interventions import comparison, experiment, report, report_text
from protot_jax.studies.interventions.experiment import InterventionConfig, SubjectModel
from protot_jax.studies.interventions.results import Comparison, InterventionReport
from protot_jax.studies.interventions.sentences import Sentence, read, shipped, shipped_digest
from protot_jax.training.run_options import RunOptions
from protot_jax.training.saved_run import DATA

FOLDER = "interventions"
RESULT = "intervention.json"
ROWS = "interventions.parquet"
PAGE = "intervention.html"
COMPARISON = "comparison.json"
COMPARISON_PAGE = "comparison.html"
WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The sentences, the prototype, its controls, and the amount of text.

    Attributes:
      concept: concepts whose sentences are used, one or several.
      sentences: a .jsonl or .tsv file of sentences; default those of the package.
      words: words by which the prototype is chosen, the one that writes them most specifically;
        default the targets.
      layer: layer of the prototype, from 0; default chosen by the words.
      prototype: index of the prototype in its layer, from 0.
      reinit_draws: number of random new vectors for the prototype.
      control_draws: number of random new vectors for each other prototype.
      reinit_seed: random seed of the new vectors and bootstrap samples.
      controls: measure every other prototype as well.
      least_probability: exclude sentences whose target has a lower baseline probability.
      all_subtokens: use the probability of all tokens of a target, not only of its first.
      gate_rows: number of validation rows to rank and match prototypes on.
      perplexity_rows: number of validation rows whose perplexity is measured; 0 for none.
      match_seeds: repeat with the matching prototypes of the run's other seeds.
      other_runs: work folders of runs; repeat in all of their seeds.
    """

    concept: tuple[str, ...] = ()
    sentences: Path | None = None
    words: tuple[str, ...] = ()
    layer: Annotated[int | None, at_least(0)] = None
    prototype: Annotated[int | None, at_least(0)] = None
    reinit_draws: Annotated[int, at_least(1)] = 20
    control_draws: Annotated[int, at_least(1)] = 5
    reinit_seed: Annotated[int, at_least(0)] = 0
    controls: bool = True
    least_probability: Annotated[float, at_least(0.0)] = 0.01
    all_subtokens: bool = False
    gate_rows: Annotated[int, at_least(1)] = 512
    perplexity_rows: Annotated[int, at_least(0)] = 32
    match_seeds: bool = True
    other_runs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Task:
    """The sentences of one concept, and the settings of its intervention."""

    sentences: list[Sentence]
    settings: InterventionConfig


def sentences_of(options: Options, concept: str | None) -> tuple[list[Sentence], str, str]:
    """The sentences of a concept, the name of their source, and its sha256.

    Raises:
      UsageError: neither a file nor a concept is named, or an unknown one.
      BadInputError: the file cannot be used.
    """
    if path := options.sentences:
        result = read(path, concept=concept)
        return result, path.name, file_digest(path)["sha256"]
    if concept is None:
        raise UsageError("no sentences are named; give --concept=NAME or --sentences=FILE")
    return shipped(concept), "shipped", shipped_digest()


def settings_from_options(
    options: Options,
    subjects: list[SubjectModel],
    sentences: list[Sentence],
    source: str,
    digest: str,
    concept: str | None,
    together: tuple[str, ...],
) -> InterventionConfig:
    """The options as the settings of one intervention.

    Raises:
      UsageError: for a layer without a prototype, or the other way round.
    """
    words = options.words
    if not words and options.layer is None:
        words = tuple(dict.fromkeys(sentence.target for sentence in sentences))
    return InterventionConfig(
        models=tuple(map(str, subjects)),
        sentences=source,
        sentences_sha256=digest,
        concept=concept,
        together=together,
        words=words,
        layer=options.layer,
        prototype=options.prototype,
        least_probability=options.least_probability,
        all_subtokens=options.all_subtokens,
        draws=options.reinit_draws,
        control_draws=min(options.control_draws, options.reinit_draws),
        controls=options.controls,
        reinit_seed=options.reinit_seed,
        gate_rows=options.gate_rows,
        perplexity_rows=options.perplexity_rows,
    )


def default_folder(run: Path, settings: InterventionConfig) -> Path:
    """The default folder of a result; its parents are created."""
    about = settings.concept or (
        " ".join(settings.words) if settings.layer is None else Path(settings.sentences).stem
    )
    place = "" if settings.layer is None else f" l{settings.layer} p{settings.prototype}"
    return interventions_folder(run) / slug(about + place)


def interventions_folder(run: Path) -> Path:
    """The folder of a run for intervention results, created if needed."""
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def format_result(result: InterventionReport) -> str:
    """The finding for a terminal."""
    lines = textwrap.wrap(report_text.conclusion(result)[0], WIDTH)
    lines += textwrap.wrap(report_text.replication(result), WIDTH)
    for seed in result.seeds:
        head = f"{seed.run}, seed {seed.seed}: {report_text.name(seed)}"
        if match := seed.match:
            head += (
                f", matched with correlation {match.similarity:.2f} (median of all pairs "
                f"{match.median:.2f}; percentile {match.percentile:.0f} of different "
                f"prototypes, p {match.p_value:.3f})"
            )
        if seed.ranking:
            head += f", rank {seed.place} by the words"
        lines += ["", head, _columns("", "targets [95 %]", "p", "validation perplexity")]
        for one in seed.modes:
            control = one.control
            lines.append(
                _columns(
                    report_text.LABELS[one.mode],
                    report_text.percent(one.effect),
                    f"{control.p:.2g}" if control else "–",
                    report_text.percent(one.text_perplexity),
                )
            )
    if skipped := result.skipped:
        lines += ["", f"{report_text.count(len(skipped), 'sentence')} skipped:"]
        lines += [f"  {one.where}: {one.reason}" for one in skipped[:5]]
    return "\n".join(lines)


def _columns(*cells: str) -> str:
    first, second, third, fourth = cells
    return f"  {first:<20}{second:>26}{third:>12}{fourth:>26}".rstrip()


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    run = options.run_folder
    concepts: list[str | None] = list(dict.fromkeys(options.concept)) or [None]
    if options.words and concepts[1:]:
        raise UsageError("--words chooses the prototype of one concept; leave it out for several")
    # Wrong names are refused before a model is loaded.
    sources = [sentences_of(options, concept) for concept in concepts]
    subjects = experiment.load_subject_models(
        run,
        other_runs=[Path(other) for other in options.other_runs],
        seed=options.run_seed,
        best=options.best,
        match_seeds=options.match_seeds,
    )
    together = tuple(filter(None, concepts)) if concepts[1:] else ()
    tasks = [
        Task(
            of_concept[0], settings_from_options(options, subjects, *of_concept, concept, together)
        )
        for concept, of_concept in zip(concepts, sources, strict=True)
    ]
    if not together:
        (task,) = tasks
        folder = arguments.workdir or default_folder(run, task.settings)
        result, page = one(subjects, run, task, folder, arguments.resume)
        print(format_result(result))
        print(page)
        return
    # The words of every concept are looked for before the first is measured.
    data = experiment.prepared(run, subjects[0])
    for task in tasks:
        experiment.check_words(data, subjects[0], task.settings)
    folder = arguments.workdir or interventions_folder(run) / slug(" ".join(together))
    several(subjects, run, tasks, folder, arguments.resume)


def several(
    subjects: list[SubjectModel], run: Path, tasks: list[Task], folder: Path, resume: Resume
) -> None:
    """Measures concepts one after the other, each in its own folder, and compares them."""
    config = {"concepts": [task.settings.concept for task in tasks], "settings": tasks[0].settings}
    with open_workdir(folder, config, resume=resume) as work:
        results, page = [], work.path
        for task in tasks:
            own = work.path / slug(str(task.settings.concept))
            result, page = one(subjects, run, task, own, resume)
            print(page)
            results.append(result)
        given = inputs(subjects, run)
        if not finish_time(work.path, given):
            record_run(work.path, subjects, tasks[0].settings, given)
            compared = comparison.compare(results)
            write_json(work.path / COMPARISON, compared)
            provenance = to_jsonable(read_provenance(work.path))
            write_text(
                work.path / COMPARISON_PAGE, comparison.page(compared, provenance=provenance)
            )
            mark_finished(work.path, given)
        compared = load_result(work.path / COMPARISON, Comparison)
        heads, *rows = comparison.format_rows(compared)
        print(terminal.format_table(heads, rows, left=range(len(heads))))
        print(work.path / COMPARISON_PAGE)


def one(
    subjects: list[SubjectModel], run: Path, task: Task, folder: Path, resume: Resume
) -> tuple[InterventionReport, Path]:
    """The result of one concept, measured or from a finished folder, and its page."""
    with open_workdir(folder, task.settings, resume=resume) as work:
        given = inputs(subjects, run)
        if done := finish_time(work.path, given):
            print(f"finished {done}")
        else:
            write_results(subjects, run, task, work.path)
            mark_finished(work.path, given)
        return load_result(work.path / RESULT, InterventionReport), work.path / PAGE


def inputs(subjects: Sequence[SubjectModel], run: Path) -> Inputs:
    """The models and the prepared text; the settings have the digest of the sentences."""
    text = file_inputs({"prepared text": run / DATA / MANIFEST})
    return {str(each): each.model.identity.text for each in subjects} | text


def write_results(
    subjects: list[SubjectModel],
    run: Path,
    task: Task,
    folder: Path,
) -> None:
    """Measures one concept and writes the three files into an open work folder."""
    data = experiment.prepared(run, subjects[0])
    subjects[0].model.warn_of_joining()
    own = {
        "documents": data.manifest["documents_sha256"],
        "sentences": task.settings.sentences_sha256,
    }
    record_run(folder, subjects, task.settings, {**inputs(subjects, run), **own})
    result, rows = experiment.perform(subjects, data, task.sentences, task.settings)
    write_table(folder / ROWS, rows)
    write_json(folder / RESULT, result)
    # The page is rendered from the file, not from the numbers in memory.
    written = load_result(folder / RESULT, InterventionReport)
    page = report.build(written, provenance=to_jsonable(read_provenance(folder)))
    write_text(folder / PAGE, page)


def record_run(
    folder: Path,
    subjects: Sequence[SubjectModel],
    settings: InterventionConfig,
    data: Inputs,
) -> None:
    """Records the provenance of one concept, or of several that are compared."""
    record_provenance(
        folder,
        collect_provenance(
            seeds={"reinitialise": settings.reinit_seed},
            dtype="float32",
            data=data,
            tokenizer=subjects[0].model.tokenizer.sha256,
        ),
    )


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)

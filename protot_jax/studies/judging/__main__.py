"""Has trained models continue prompts, measures the texts, and has judges compare them.

    iaj protot judge --run=runs/protot --run=runs/llama --judge=perplexity:smollm2
    iaj protot judge --run=runs/protot --run=runs/llama --prompts=mine.jsonl --judge=tokens:FOLDER

After Prototype Transformer, appendix B. Each model continues the same held-out beginnings of
documents (or those of a file of JSON lines with prompt and reference), greedily and sampled. The
texts are measured by BLEU and ROUGE-L against the true continuation, distinct n-grams and
repetition. A judge sees each pair of models in both orders; judges that read nothing are always
among them. Ratings are printed only of a judge that prefers real continuations to worse ones
(`lm_jax.evaluate`).

    tokens:FOLDER        a language model's most likely answer, A, B or Tie
    perplexity:FOLDER    the continuation of lower loss under a language model, or under a run
    cached:FILE          answers from a file; FILE.missing lists the prompts that have none
    chat:MODEL@URL       a chat endpoint of yours, asked at that URL and nowhere else

FOLDER is whatever `lm_jax.load_pretrained` takes: a folder, a GGUF file, a name such as smollm2.

Into `--workdir`, by default a folder below `judging` of the first run, it writes

    rows.parquet         every continuation with its measures
    verdicts.parquet     every verdict, controls too
    summary.json         every number of the report (`results.py`)
    report.html          tables, ratings, samples, beside the paper's

A killed command resumes with what was generated, answered and scored.
"""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.evaluate import verdicts
from lm_jax.evaluate.pairwise import NULLS
from lm_jax.model.decode import Sampling
from lm_jax.run import cli, terminal
from lm_jax.run.config import config_hash
from lm_jax.run.files import read_json, storage_error, to_jsonable, write_json, write_text
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import CommandOptions, Flag, at_least
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import open_workdir
from lm_jax.text.preparation import MANIFEST
from protot_jax.studies.judging import continuations, judges, prompts, report, results, summary
from protot_jax.studies.judging.continuations import Decoding
from protot_jax.studies.judging.prompts import Prompts
from protot_jax.training.run_options import load_each
from protot_jax.training.saved_run import DATA, TrainedModel, run_names

FOLDER = "judging"
ROWS = "rows.parquet"
VERDICTS = "verdicts.parquet"
RESULT = "summary.json"
PAGE = "report.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The models, the prompts, the samplers and the judges.

    Attributes:
      run: run, one of its seeds' folders, or exported model; one flag for each.
      checkpoint: checkpoint of lowest validation perplexity, or the last one.
      judge: tokens:FOLDER, perplexity:FOLDER, cached:FILE or chat:MODEL@URL.
      prompts: a file of JSON lines with prompt and reference; default test documents.
      count: how many prompts at most.
      prompt_tokens: length of a prompt from a test document.
      new_tokens: the most tokens that a model generates.
      temperature: temperature of the sampled continuations.
      top_k: sample from the k most probable tokens; 0 for all.
      top_p: sample from the most probable tokens of this total probability.
      repetition_penalty: penalty of sampled tokens that occurred; 1 for none.
      no_repeat_ngram: length of n-grams that are not sampled twice; 0 for none.
      seed: random seed of prompts, sampler, controls and bootstrap.
      resamples: number of bootstrap samples.
    """

    run: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    checkpoint: Literal["best", "last"] = "best"
    judge: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    prompts: Path | None = None
    count: Annotated[int, at_least(2)] = 100
    prompt_tokens: Annotated[int, at_least(2)] = 100
    new_tokens: Annotated[int, at_least(2)] = 50
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    repetition_penalty: float = 1.05
    no_repeat_ngram: int = 4
    seed: Annotated[int, at_least(0)] = 0
    resamples: Annotated[int, at_least(100)] = 1_000


@dataclasses.dataclass(frozen=True)
class Task:
    """The models by name, the prompts, and the samplers by decoding."""

    models: Mapping[str, TrainedModel]
    runs: Mapping[str, Path]
    prompts: Prompts
    decodings: Mapping[Decoding, Sampling]


def task_from_options(options: Options) -> Task:
    """Loads the models and the prompts.

    Raises:
      UsageError: no run, one run twice, or options that no sampler or context can have.
      BadInputError, CorruptError: a run or the file of prompts cannot be used.
    """
    sampled = Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        options.repetition_penalty,
        options.no_repeat_ngram,
    )
    if options.temperature == 0:
        raise UsageError("temperature = 0 is greedy, which is measured in any case; give more")
    judges.check(options.judge)
    runs, loaded = zip(*load_each(options.run, best=options.checkpoint == "best"), strict=True)
    models = {
        f"{name}, seed {model.seed}": model
        for name, model in zip(run_names(runs, loaded), loaded, strict=True)
    }
    if options.prompts is not None:
        given = prompts.read(options.prompts, count=options.count)
    else:
        given = prompts.held_out(
            next(iter(models.values())),
            runs[0],
            count=options.count,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            seed=options.seed,
        )
    # A prompt that is too long is refused before a folder is made.
    continuations.prompt_ids(models, given.prompts, options.new_tokens)
    decodings: dict[Decoding, Sampling] = {"greedy": Sampling(), "sampled": sampled}
    return Task(models, dict(zip(models, runs, strict=True)), given, decodings)


def _described(task: Task) -> tuple[results.Model, ...]:
    return tuple(
        results.Model(
            name,
            str(task.runs[name]),
            model.config.model,
            model.seed,
            model.step,
            model.sha256,
            lm_jax.count_params(model.cfg, mixer=model.mixer),
        )
        for name, model in task.models.items()
    )


def data_identity(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """The documents and the tokenizer of prepared data; of an export, the documents of its run."""
    documents = manifest["notes"].get("of_documents_sha256", manifest["documents_sha256"])
    return documents, manifest["tokenizer_sha256"]


def _settings(options: Options, task: Task) -> results.Settings:
    manifests = [read_json(run / DATA / MANIFEST) for run in task.runs.values()]
    same = {data_identity(one) for one in manifests}
    return results.Settings(
        task.prompts.source,
        len(task.prompts.prompts),
        task.prompts.sha256,
        task.prompts.skipped,
        options.new_tokens,
        dataclasses.asdict(task.decodings["sampled"]),
        options.seed,
        options.resamples,
        len(same) == 1,
    )


def write_results(options: Options, task: Task, settings: results.Settings, folder: Path) -> None:
    """Generates, judges and writes every file into an open work folder."""
    models = _described(task)
    record_provenance(
        folder,
        collect_provenance(
            seeds={"judging": options.seed},
            dtype="float32",
            data={"prompts": settings.prompts_sha256}
            | {name: model.identity.text for name, model in task.models.items()},
        ),
    )
    names = [*(f"null:{kind}" for kind in NULLS), *options.judge]
    # A judge that cannot be used is refused before anything is generated.
    with judges.opened(
        names, folder, [one.checkpoint_sha256 for one in task.models.values()]
    ) as opened:
        generated = {"models": models, "settings": dataclasses.replace(settings, resamples=0)}
        texts = continuations.generate(
            task.models,
            task.prompts.prompts,
            task.decodings,
            folder,
            new_tokens=options.new_tokens,
            seed=options.seed,
            fingerprint=config_hash(generated),
        )
        bleu = summary.scored(task.prompts, texts)
        rouge = summary.rouge_scored(task.prompts, texts)
        write_table(folder / ROWS, summary.rows(task.prompts, texts, bleu, rouge))
        by_decoding = {
            decoding: {name: [one.text for one in texts[decoding, name]] for name in task.models}
            for decoding in task.decodings
        }
        said = [judges.judge(each, task.prompts, by_decoding, seed=options.seed) for each in opened]
    write_table(folder / VERDICTS, judges.table(said))
    write_json(
        folder / RESULT,
        summary.summarise(settings, models, task.prompts, texts, bleu, rouge, said),
    )
    # The page is rendered from the file, not from the numbers in memory.
    written = load_result(folder / RESULT, results.JudgingSummary)
    provenance: dict[str, Any] = to_jsonable(read_provenance(folder))
    write_text(folder / PAGE, report.render(written, provenance=provenance))


def format_result(result: results.JudgingSummary) -> str:
    """Measures of the texts and ratings of the models, for a terminal."""
    heads = ["model", "decoding", "BLEU", "ROUGE-L", "repetition", "distinct-2", "words"]
    rows = [
        [
            one.model,
            one.decoding or "",
            *(
                "" if value is None else f"{value:.3f}"
                for value in (
                    one.bleu and one.bleu.estimate,
                    one.rouge_l and one.rouge_l.estimate,
                    one.repetition and one.repetition.estimate,
                    one.distinct[1],
                )
            ),
            f"{one.words.estimate:.1f}",
        ]
        for one in result.measured
    ]
    lines = [terminal.format_table(heads, rows, left=(0, 1))]
    for judge in result.judges:
        # A file from before may hold ratings of a judge that failed.
        failure = summary.why_not(verdicts.failed(judge.controls))
        for judged in judge.decodings:
            if judged.ratings is None or failure:
                why = judged.no_ratings or failure
                lines.append(f"{judge.name}, {judged.decoding}: no ratings, {why}")
                continue
            lines.append(f"{judge.name}, {judged.decoding}:")
            lines += [
                f"  {one.model}: {one.strength.estimate:.0f} ({one.strength.low:.0f} to "
                f"{one.strength.high:.0f}; online Elo {one.elo.estimate:.0f})"
                for one in judged.ratings
            ]
    return "\n".join(lines)


def default_folder(run: Path, config: Mapping[str, Any]) -> Path:
    """A folder below the first run for what was asked of these models; its parent is made."""
    parent = run / FOLDER
    try:
        parent.mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(parent, error) from error
    return parent / config_hash(config)[:12]


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    task = task_from_options(options)
    settings = _settings(options, task)
    config: dict[str, Any] = {
        "models": _described(task),
        "settings": settings,
        "judges": list(options.judge),
    }
    folder = arguments.workdir or default_folder(next(iter(task.runs.values())), config)
    # A file of answers that has grown makes another report of the same texts: --resume=force.
    config["answers"] = [judges.identity(name) for name in options.judge]
    with open_workdir(folder, config, resume=arguments.resume) as work:
        given = {one: model.identity.text for one, model in task.models.items()}
        for name in options.judge:
            given |= judges.inputs(name)
        if done := finish_time(work.path, given):
            print(f"finished {done}")
        else:
            write_results(options, task, settings, work.path)
            mark_finished(work.path, given)
        print(format_result(load_result(work.path / RESULT, results.JudgingSummary)))
        print(work.path / PAGE)


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)

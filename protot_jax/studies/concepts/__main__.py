"""Analyses the prototypes of a trained model: what writes to them, and when they are read.

    iaj protot concepts --run=runs/speeches
    iaj protot concepts --run=runs/speeches --judge=local:FOLDER --top=20
    iaj protot concepts --run=runs/protot --compare=heads:runs/llama --compare=sae:runs/llama

After Prototype Transformer, section 5.1 and appendix A.8. Into `--workdir`, by default the folder
`concepts` of the run, it writes

    activations.parquet   every gate over the beginnings of documents (`collect.py`)
    concepts.json         all statistics and the top texts (`results.py`)
    concepts.html         the report: the same numbers as one offline page
    answers.jsonl         the answers of the judge, each with its unit, model and judge

`--judge=local:FOLDER` has a language model name the themes, `--judge=cached:FILE` takes answers
from a file, `--judge=chat:MODEL@URL` asks an endpoint with OpenAI's protocol. `--rubric=FILE` has
other instructions than ours, and `--marked=0.8 --judge_temperature=1 --judge_tokens=756` are the
settings of the released script. `--compare` reads the same texts with another model, and describes
its heads by the norm of their values, or the features of a small sparse autoencoder that is trained
for it (`units.py`). `--ablated` sets the page's panel of interventions (`ablations.py`). A killed
command starts again from the beginning, but keeps the answers of its judge.
"""

from collections.abc import Sequence
import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from lm_jax.evaluate import judge
from lm_jax.evaluate.answers import digest
from lm_jax.evaluate.judge_prompt import MARKED, MOST_TEXTS, read_rubric
from lm_jax.run import cli
from lm_jax.run.files import file_digest, to_jsonable, write_bytes, write_json
from lm_jax.run.finished import file_inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import Flag, at_least
from lm_jax.run.workdir import open_workdir
from lm_jax.text.examples import Examples
from lm_jax.text.preparation import MANIFEST, open_prepared
from protot_jax.studies.concepts import collect, report_data, units
from protot_jax.studies.concepts import report as report_page
from protot_jax.studies.concepts.ranking import RankBy
from protot_jax.studies.concepts.results import ConceptReport, Statistic
from protot_jax.training.run_options import RunOptions
from protot_jax.training.saved_run import DATA, TrainedModel

FOLDER = "concepts"
RESULT = "concepts.json"
PAGE = "concepts.html"
ANSWERS = "answers.jsonl"
# Options of a judge that a work folder names where they differ from their defaults.
ASKING = ("marked", "judge_texts", "judge_tokens", "judge_temperature")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The texts to analyse, and the settings of the report.

    Attributes:
      split: split of the run's prepared data.
      texts: maximum number of documents to read.
      length: number of tokens of each document, its beginning-of-sequence token included.
      batch_size: number of documents in one forward pass.
      top: number of texts and of tokens to show of each prototype.
      rank_by: statistic of the write gate that ranks a prototype's texts.
      judge: judge that names the themes: null for none, local:FOLDER, cached:FILE or
        chat:MODEL@URL.
      rubric: a text file with other instructions for the judge, such as those of a paper.
      marked: share of a text's words that is marked for the judge, the strongest ones.
      judge_texts: the most of the --top texts that are given to the judge.
      judge_tokens: maximum number of tokens of the judge's answer; 0 for 256 of local:FOLDER and
        for no limit of chat:MODEL@URL.
      judge_temperature: temperature at which local:FOLDER or chat:MODEL@URL samples its answer; 0
        for greedy.
      compare: heads:RUN or sae:RUN, units of another model on the same prepared data.
      resamples: number of bootstrap samples, and of permutations of each test.
      seed: random seed of the permutations and bootstrap samples.
      ablated: number of a prototype's texts on which it is left out and words are attributed; 0 for
        none; memory grows with the square of --length.
    """

    split: Literal["train", "validation", "test"] = "validation"
    texts: Annotated[int, at_least(2)] = 4_000
    length: Annotated[int, at_least(collect.LEAST + 1)] = 32
    batch_size: Annotated[int, at_least(1)] = 64
    top: Annotated[int, at_least(1)] = 10
    rank_by: RankBy = "mean"
    judge: str = "null"
    rubric: str = ""
    marked: float = MARKED
    judge_texts: Annotated[int, at_least(1)] = MOST_TEXTS
    judge_tokens: Annotated[int, at_least(0)] = 0
    judge_temperature: Annotated[float, at_least(0)] = 0.0
    compare: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    resamples: Annotated[int, at_least(99)] = 1_000
    seed: Annotated[int, at_least(0)] = 0
    ablated: Annotated[int, at_least(0)] = 2


def report(
    model: TrainedModel,
    data: Path,
    folder: Path,
    settings: report_data.ConceptConfig,
    judge: judge.Judge,
    *,
    compared: Sequence[units.Compared] = (),
    batch_size: int = 64,
) -> ConceptReport:
    """Writes the files into an open work folder, and returns the data of the report.

    Args:
      model: to be analysed.
      data: the prepared folder of its run.
      folder: to write into.
      settings: of the analysis.
      judge: names the themes.
      compared: other units to describe.
      batch_size: texts of one forward pass.

    Raises:
      UsageError: the model has no prototypes.
      BadInputError, CorruptError: the data cannot be used.
      StorageError: the folder cannot be written.
    """
    # A model without prototypes is refused before any work.
    _ = model.prototypes
    model.warn_of_joining()
    examples = Examples(
        open_prepared(data, tokenizer=model.tokenizer),
        settings.split,
        context=settings.length - 1,
        mode="truncate",
    )
    record_provenance(
        folder,
        collect_provenance(
            seeds={"run": model.seed, "analysis": settings.seed},
            dtype="float32",
            data={"documents": examples.prepared.manifest["documents_sha256"]}
            | {f"{one.kind} of {one.name}": one.model.identity.text for one in compared}
            | {"model": model.identity.text},
            tokenizer=model.tokenizer.sha256,
        ),
    )
    activations = folder / collect.ACTIVATIONS
    texts = collect.collect(
        model, examples, activations, texts=settings.texts, batch_size=batch_size
    )
    result = report_data.build_report_data(model, texts, activations, settings, judge, compared)
    write_json(folder / RESULT, result)
    provenance = to_jsonable(read_provenance(folder))
    write_bytes(folder / PAGE, report_page.render(result, provenance=provenance).encode())
    return result


def format_report(result: ConceptReport) -> str:
    """Summary of the report for a terminal."""
    model, settings = result.model, result.settings
    half_lives = [
        math.inf if each.half_life is None else each.half_life for each in result.prototypes
    ]
    quartiles = np.quantile(half_lives, [0.0, 0.25, 0.5, 0.75, 1.0], method="nearest")
    lines = [
        f"{settings.texts:,} texts of the {settings.split} split, {settings.tokens:,} "
        f"tokens, perplexity {model.perplexity:.1f}; {model.layers} layers of "
        f"{model.prototypes} prototypes",
        "half-life in tokens, minimum, quartiles, maximum: {:.2f}, {:.2f}, {:.2f}, {:.2f}, "
        "{:.2f}".format(*quartiles),
    ]
    lines += [
        "layer {layer}, write gates: largest {top_1:.2f}, L1 ratio {l1_ratio:.1f}, "
        "Gini {gini:.2f}, entropy {entropy:.2f}, MI {mutual_information:.2f} (by chance "
        "{mutual_information_by_chance:.2f}), dead {dead}".format(
            layer=layer.layer, **dataclasses.asdict(layer.write)
        )
        for layer in result.layers
    ]
    lag, related = result.lag, result.half_life_repetition
    lines.append(f"reading one token before writing, lead over lag 0: {_tested(lag.lead)}")
    lines.append(f"the same, lead over other prototypes: {_tested(lag.own_lead)}")
    if lag.peaks_one_before is not None:
        peak = lag.lags[int(np.argmax(np.asarray(lag.mean, float)))]
        lines.append(
            f"reading peaks one token before writing for {lag.peaks_one_before:.0%} of prototypes, "
            f"in the mean over prototypes at lag {peak:+d}"
        )
    lines.append(
        f"half-life and token repetition, within layers: Spearman {_tested(related.spearman)}"
    )
    return "\n".join(lines)


def _tested(result: Statistic) -> str:
    counts = f"{result.prototypes} prototypes, {result.texts:,} texts"
    if result.value is None:
        return f"none ({counts})"
    value, p, low, high = (
        "?" if number is None else f"{number:.3f}"
        for number in (result.value, result.p, result.low, result.high)
    )
    return f"{value} ({low} to {high}, p {p}; {counts})"


def settings_from_options(options: Options) -> report_data.ConceptConfig:
    """The options as the settings of one analysis."""
    return report_data.ConceptConfig(
        split=options.split,
        texts=options.texts,
        length=options.length,
        top=options.top,
        rank_by=options.rank_by,
        resamples=options.resamples,
        seed=options.seed,
        ablated=options.ablated,
    )


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    model, run = options.load(), Path(options.run)
    # A model without prototypes is refused before any work.
    _ = model.prototypes
    compared = units.load(options.compare, model, best=options.best)
    settings, named = settings_from_options(options), options.judge
    folder = arguments.workdir or run / FOLDER
    rubric = read_rubric(options.rubric) if options.rubric else judge.RUBRIC
    judged = judge.build_judge(
        named,
        answers=folder / ANSWERS,
        rubric=rubric,
        marked=options.marked,
        most_texts=options.judge_texts,
        temperature=options.judge_temperature,
        max_new_tokens=options.judge_tokens or None,
    )
    kind, _, place = named.partition(":")
    config = {
        "run": str(run),
        "seed": model.seed,
        "step": model.step,
        "judge": named,
        "rubric": digest(rubric) if options.rubric else "",
        # A file that has grown makes another report.
        "answers": file_digest(Path(place))["sha256"] if kind == "cached" else "",
        "analysis": settings,
    }
    asking = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Options)
        if field.name in ASKING and getattr(options, field.name) != field.default
    }
    if asking:
        config["asking"] = asking
    if compared:
        config["compare"] = [(one.kind, one.name, one.model.sha256) for one in compared]
    given = {
        "model": model.identity.text,
        **{f"{one.kind} of {one.name}": one.model.identity.text for one in compared},
        **file_inputs({"prepared text": run / DATA / MANIFEST}),
        **judge.judge_inputs(named),
    }
    with open_workdir(folder, config, resume=arguments.resume) as work:
        if done := finish_time(work.path, given):
            print(f"finished {done}")
        else:
            report(
                model,
                run / DATA,
                work.path,
                settings,
                judged,
                compared=compared,
                batch_size=options.batch_size,
            )
            mark_finished(work.path, given)
            if isinstance(judged, judge.PromptedJudge):
                print(judged.summary())
        print(format_report(load_result(work.path / RESULT, ConceptReport)))
        print(work.path / PAGE)


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)

"""Reads the gates of a run's prototypes over the beginnings of documents, and analyses them.

Besides what every study has, the work folder holds

    activations.parquet   every gate over the beginnings of documents (`collect.py`)
    answers.jsonl         the answers of the judge, each with its unit, model and judge

A command that was killed starts again from the beginning, but keeps the answers of its judge.
"""

from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from lm_jax.errors import BadInputError
from lm_jax.evaluate import judge, judge_answer
from lm_jax.evaluate.answers import Answers
from lm_jax.evaluate.judge_prompt import RUBRIC, read_rubric
from lm_jax.run.finished import file_inputs
from lm_jax.study import Opened, Work
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import MANIFEST, open_prepared
from protot_jax.studies.concepts import collect, numbers, units
from protot_jax.studies.concepts.results import ConceptReport
from protot_jax.studies.concepts.settings import ConceptConfig
from protot_jax.training.saved_run import DATA, TrainedModel

ANSWERS = "answers.jsonl"


class Models(NamedTuple):
    """The model that is analysed, and others whose units are described on the same texts."""

    model: TrainedModel
    compared: list[units.Compared]


def inputs(config: ConceptConfig) -> Opened:
    """The models, the prepared text, and what decides the answers of the judge.

    Raises:
      UsageError: the model has no prototypes, or a comparison or the judge cannot be had.
      BadInputError, CorruptError: a run, the rubric or the judge's file cannot be read.
    """
    model = config.load()
    # A model without prototypes is refused before any work.
    _ = model.prototypes
    compared = units.load(config.compare, model, best=config.best)
    judge.check_judge(config.judge, **_asking(config))
    if config.rubric:
        read_rubric(config.rubric)
    given = {
        "model": model.identity.text,
        **{f"{one.kind} of {one.name}": one.model.identity.text for one in compared},
        **file_inputs({"prepared text": config.run_folder / DATA / MANIFEST}),
        **file_inputs({"rubric": config.rubric}),
        **judge.judge_inputs(config.judge),
    }
    return Opened(given, Models(model, compared))


def _asking(config: ConceptConfig) -> dict[str, Any]:
    return {
        "marked": config.marked,
        "most_texts": config.judge_texts,
        "temperature": config.judge_temperature,
        "max_new_tokens": config.judge_tokens or None,
    }


def build_judge(config: ConceptConfig, answers: Path) -> judge.Judge:
    """The judge of the settings, which adds its answers to a file, and finds them there again."""
    rubric = read_rubric(config.rubric) if config.rubric else RUBRIC
    return judge.build_judge(config.judge, answers=answers, rubric=rubric, **_asking(config))


def warn_of_answers(config: ConceptConfig, model: TrainedModel) -> None:
    """Logs what of a file of answers does not fit the model, before anything is computed.

    An answer is found by its exact prompt, which is known only when the texts have been read. But
    most lines name their model and unit.

    Args:
      config: settings, whose judge may be a file.
      model: model that is analysed.
    """
    kind, _, place = config.judge.partition(":")
    if kind != "cached":
        return
    entries = Answers(place).entries()
    own = units.identity(model)
    named = [each for each in entries if "model" in each and "unit" in each]
    fitting = [each for each in named if each["model"] == own]
    layers, count = model.cfg.num_layers, model.prototypes.num_prototypes
    wanted = [f"L{layer} P{r}" for layer in range(layers) for r in range(count)]
    missing = sorted(set(wanted).difference(each["unit"] for each in fitting), key=wanted.index)
    if not entries:
        problem = "it has no answers"
    elif len(named) == len(entries) and not fitting:
        others = sorted({each["model"] for each in named})
        problem = f"all {len(named)} answers are of another model ({others[0]}), none of {own}"
    elif len(named) == len(entries) and missing:
        problem = f"{len(missing)} of {len(wanted)} prototypes have no answer, first {missing[0]}"
    else:
        problem = ""
    if problem:
        logging.warning(
            "judge = %r: %s; prompts without an answer get no label, and are written to %s.missing",
            *(config.judge, problem, place),
        )
    if unreadable := [each for each in entries if not _is_readable(each["answer"])]:
        logging.warning(
            "judge = %r: %d of %d answers are not the requested JSON and give no label, first that "
            "of %s",
            *(config.judge, len(unreadable), len(entries)),
            unreadable[0].get("unit", f"prompt {unreadable[0]['prompt_sha256'][:12]}"),
        )


def _is_readable(answer: str) -> bool:
    try:
        judge_answer.parse(answer)
    except BadInputError:
        return False
    return True


def measure(config: ConceptConfig, work: Work) -> ConceptReport:
    """Stores the gates, and describes every prototype.

    Raises:
      BadInputError, CorruptError: the data cannot be used.
      StorageError: the folder cannot be written.
      StoppedError: the command was asked to stop.
    """
    model, compared = work.loaded
    warn_of_answers(config, model)
    model.warn_of_joining()
    examples = Examples(
        open_prepared(config.run_folder / DATA, tokenizer=model.tokenizer),
        config.split,
        context=config.length - 1,
        mode="truncate",
    )
    work.record(
        data={"documents": examples.prepared.manifest["documents_sha256"]},
        tokenizer=model.tokenizer.sha256,
        seeds={"run": model.seed},
    )
    judged = build_judge(config, work.path / ANSWERS)
    activations = work.path / collect.ACTIVATIONS
    texts = collect.collect(
        model, examples, activations, texts=config.texts, batch_size=config.batch_size
    )
    result = numbers.summarise(model, texts, activations, config, judged, compared)
    if isinstance(judged, judge.PromptedJudge):
        print(judged.summary())
    return result

"""Text, dense model, and post-training of each variant with one control.

Besides what every study has, the work folder holds

    text/        pretrain.jsonl and posttrain.jsonl (`corpus`)
    data/        the prepared text of pretraining, with the tokenizer
    dense/       pretraining, and the model in dense/model (`dense`)
    <variant>/   a work folder of `iaj sparse posttrain` for each variant; the controls are in the
                 first
"""

import dataclasses
import itertools
import json
from pathlib import Path

from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.finished import Inputs
from lm_jax.study import Work, frame
from lm_jax.text.corpora import corpus_inputs
from lm_jax.text.preparation import CorpusConfig, prepare_corpus
from lm_jax.text.prepared import MANIFEST, Prepared
from lm_jax.text.tokenizer_training import train_byte_tokenizer
from lm_jax.train.step import check_batch
from sparse_jax.studies.pair import corpus, dense, numbers, task_scores
from sparse_jax.studies.pair.folders import DENSE, MODEL, TEXT, exported_models, text_files
from sparse_jax.studies.pair.results import PairSummary
from sparse_jax.studies.pair.settings import VARIANTS, PairConfig
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain import run as posttrain
from sparse_jax.studies.posttrain.results import PosttrainSummary
from sparse_jax.studies.posttrain.settings import PosttrainConfig

DATA = "data"
# Read by the training of the tokenizer alone: often enough that all numbers of two digits, which
# tasks on years continue with, are tokens of a small vocabulary too.
_NUMBERS = ["x".join(f"{number:02d}" for number in range(100))] * 10_000


def inputs(config: PairConfig) -> Inputs:
    """The text of the pair."""
    return corpus_inputs({"config.text": config.text.source})


def train_all(config: PairConfig, work: Work) -> PairSummary:
    """Runs or resumes all steps.

    Args:
      config: the settings.
      work: the open work folder; with `force`, post-training of other settings or weights is
        renamed and run again.

    Raises:
      UsageError: a batch does not divide over the devices.
    """
    folder = work.path
    mesh = sharding.make_mesh(*config.posttrain.mesh)
    check_batch(config.dense.batch_size, 1, mesh)
    check_batch(config.posttrain.batch_size, config.posttrain.accumulate, mesh)
    processes.on_first(lambda: corpus.write_corpora(config.text, folder / TEXT))
    prepared = prepare(config, folder)
    work.record(
        data={"documents": prepared.manifest["documents_sha256"]}
        | dict(prepared.manifest["sources"]),
        tokenizer=prepared.manifest["tokenizer_sha256"],
        seeds={"text": config.text.seed, "dense": config.dense.seed}
        | {f"run {i}": seed for i, seed in enumerate(config.posttrain.seeds)},
    )
    trained = dense.train_dense(config, prepared, folder / DENSE, mesh)
    results = _post_train(config, work)
    tasks, unscored = task_scores.make_tasks(
        config.text.tasks,
        prepared.tokenizer,
        corpus.read_prompts(text_files(folder)),
        prompts=config.text.scored_prompts,
        context=config.context,
    )
    controls = results[config.variants[0]].controls
    models = exported_models(controls, numbers.variants(results))
    scores = task_scores.score(folder, models, tasks, context=config.context)
    return numbers.summarise(trained, results, scores, unscored)


def _post_train(config: PairConfig, work: Work) -> dict[str, PosttrainSummary]:
    """The post-training of each variant; the first one's controls serve all."""
    first = None
    results: dict[str, PosttrainSummary] = {}
    for name in config.variants:
        part, settings = work.part(name), posttrain_config(config, work.path, name)
        given = posttrain.inputs(settings)
        results[name] = frame.run_part(STUDY, settings, part, given, controls=first)
        first = first or part.path
    return results


def posttrain_config(config: PairConfig, folder: Path, variant: str) -> PosttrainConfig:
    """The settings of one post-training of the pair."""
    posttrain_config = config.posttrain
    if variant != config.variants[0]:
        posttrain_config = dataclasses.replace(
            posttrain_config, seeds=config.ablation_seeds, slacks=config.ablation_slacks
        )
    return dataclasses.replace(
        posttrain_config,
        model=str(folder / DENSE / MODEL),
        corpus=_corpus(config, folder / TEXT / corpus.POSTTRAIN),
        context=config.context,
        allow_fallback=config.allow_fallback,
        **VARIANTS[variant],
    )


def _corpus(config: PairConfig, file: Path) -> CorpusConfig:
    held_out = config.text.validation_share
    return CorpusConfig(
        source=str(file),
        unit="document",
        vocab_size=config.text.vocab_size,
        splits=(1 - held_out, held_out, 0.0),
        seed=config.text.seed,
    )


def prepare(config: PairConfig, folder: Path) -> Prepared:
    """The prepared text of pretraining, with a tokenizer that is trained on it."""
    file = folder / TEXT / corpus.PRETRAIN

    def train_and_prepare() -> None:
        if (folder / DATA / MANIFEST).exists():
            return
        with file.open(encoding="utf-8") as lines:
            texts = (json.loads(line)["text"] for line in lines)
            tokenizer = train_byte_tokenizer(
                itertools.chain(texts, _NUMBERS), vocab_size=config.text.vocab_size
            )
        prepare_corpus(folder / DATA, _corpus(config, file), tokenizer=tokenizer)

    processes.on_first(train_and_prepare)
    return prepare_corpus(folder / DATA, _corpus(config, file))

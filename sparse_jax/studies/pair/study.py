"""Runs the pair: text, dense model, post-training of each variant with one control, summary.

The work folder then holds

    text/                    pretrain.jsonl and posttrain.jsonl (`corpus`)
    data/                    the prepared text of pretraining, with the tokenizer
    dense/                   pretraining, and the model in dense/model (`dense`)
    <variant>/               a work folder of `sparse_jax.studies.posttrain.posttrain` for each
                             variant; the controls are in the first
    summary.json             `results.PairSummary`, with the tasks of all models (`task_scores`)
    report.html              pretraining, edges against the loss of the control, tasks
"""

import dataclasses
import itertools
import json
from pathlib import Path

import jax

from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.finished import finish_time
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.text.preparation import MANIFEST, CorpusConfig, Prepared, prepare_corpus
from lm_jax.text.tokenizer_training import train_byte_tokenizer
from sparse_jax.studies.pair import corpus, dense, report, task_scores
from sparse_jax.studies.pair.config import VARIANTS, PairConfig
from sparse_jax.studies.pair.folders import DENSE, MODEL, SUMMARY, TEXT, exported_models, text_files
from sparse_jax.studies.pair.results import PairSummary, VariantResult
from sparse_jax.studies.posttrain import posttrain
from sparse_jax.studies.posttrain.config import PosttrainConfig
from sparse_jax.studies.posttrain.results import PosttrainSummary

DATA = "data"
# Read by the training of the tokenizer alone: often enough that all numbers of two digits, which
# tasks on years continue with, are tokens of a small vocabulary too.
_NUMBERS = ["x".join(f"{number:02d}" for number in range(100))] * 10_000
REPORT = "report.html"


def run(config: PairConfig, folder: Path, *, force: bool = False) -> PairSummary:
    """Runs or resumes all steps in an open work folder and returns the summary.

    With `force`, post-training of other settings or weights is renamed and run again.
    """
    data, fsdp, tensor = config.posttrain.mesh
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    processes.on_first(lambda: corpus.write_corpora(config.text, folder / TEXT))
    prepared = prepare(config, folder)
    origin = collect_provenance(
        seeds={"text": config.text.seed, "dense": config.dense.seed}
        | {f"run {i}": seed for i, seed in enumerate(config.posttrain.seeds)},
        dtype="float32",
        data={"documents": prepared.manifest["documents_sha256"]}
        | dict(prepared.manifest["sources"]),
        tokenizer=prepared.manifest["tokenizer_sha256"],
    )
    processes.on_first(lambda: record_provenance(folder, origin))
    trained = dense.train_dense(config, prepared, folder / DENSE, mesh)
    first = None
    results: dict[str, PosttrainSummary] = {}
    for name in config.variants:
        work, settings = folder / name, posttrain_config(config, folder, name)
        if force or not finish_time(work, posttrain.inputs(settings)):
            processes.on_first(lambda work=work: work.mkdir(exist_ok=True))
            posttrain.run(settings, work, force=force, controls=first)
        results[name] = load_result(work / posttrain.SUMMARY, PosttrainSummary)
        first = first or work
    plain = results[config.variants[0]]
    variants = tuple(
        VariantResult(variant=name, bounds=each.bounds, runs=each.runs)
        for name, each in results.items()
    )
    tasks, unscored = task_scores.make_tasks(
        config.text.tasks,
        prepared.tokenizer,
        corpus.read_prompts(text_files(folder)),
        prompts=config.text.scored_prompts,
        context=config.context,
    )
    models = exported_models(plain.controls, variants)
    summary = PairSummary(
        dense=trained,
        dense_loss=plain.dense_loss,
        validation_tokens=plain.validation_tokens,
        controls=plain.controls,
        variants=variants,
        scores=task_scores.score(folder, models, tasks, context=config.context),
        unscored=unscored,
        device=jax.devices()[0].device_kind,
    )
    processes.on_first(lambda: _conclude(config, folder, summary))
    return load_result(folder / SUMMARY, PairSummary)


def _conclude(config: PairConfig, folder: Path, summary: PairSummary) -> None:
    write_json(folder / SUMMARY, summary)
    summary = load_result(folder / SUMMARY, PairSummary)
    origin = to_jsonable(read_provenance(folder))
    write_text(folder / REPORT, report.build(config, summary, folder, provenance=origin))


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

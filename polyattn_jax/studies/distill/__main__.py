"""Trains the heads that a recipe replaces to match softmax, and measures what that repairs.

    iaj polyattn distill --config=polyattn/distill --workdir=runs/distill
    iaj polyattn distill --config=polyattn/distill --config.model=FOLDER \
        --config.recipe=performer:m=256 --config.hybrid=heads.json --workdir=runs/mine

1. The corpus is tokenized with the model's tokenizer and split; b_auto is calibrated if the recipe
   asks for it.
2. Adapters of queries and keys, or the matrices of a feature map, are trained on the outputs of the
   frozen model's heads (`matching.py`), in `train/`, from the last checkpoint if there is one.
3. On held-out windows, before and after: S of the rows of every head, the error of its output, and
   the loss of the frozen model and of the hybrid.
4. Does the safe share of a head before training predict what training repairs? A rank correlation
   over heads.

The work folder then holds

    data/             the prepared corpus
    calibration.json  b_auto, where the recipe asks for it (`bias_tables` for one of each head)
    train/            checkpoints, metrics.parquet, evaluations.parquet (`lm_jax.train.loop`)
    rows.parquet      one row per head (`results.ROWS`)
    losses.parquet    one row per window (`results.LOSSES`)
    trained/          the trained heads, as `polyattn_jax.load_trained` reads them
    summary.json      every number of the report
    report.html       the report, one offline file

The same command resumes a killed run, which ends with the same parameters.
"""

from pathlib import Path
import shutil

import jax

from lm_jax.model import params as params_lib
from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.files import write_json, write_text
from lm_jax.run.finished import Inputs, file_inputs, finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.tables import write_table
from lm_jax.run.workdir import open_workdir
from lm_jax.text.corpora import corpus_inputs
from lm_jax.train.config import MAY_CHANGE, CheckpointPolicy, TrainConfig
from lm_jax.train.loop import TrainResult, train
from lm_jax.weights import hub
from lm_jax.weights.load import identities
from polyattn_jax.audit.provenance import read_provenance
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.distill import report
from polyattn_jax.studies.distill.config import DistillConfig
from polyattn_jax.studies.distill.matching import HeadMatching
from polyattn_jax.studies.distill.measure import head_table, loss_table, measure
from polyattn_jax.studies.distill.results import DistillSummary
from polyattn_jax.studies.distill.summary import summarise
from polyattn_jax.studies.distill.task import TRAIN, Task, objective_of, open_task
from polyattn_jax.studies.distill.trained import TrainedHeads, save_trained

SUMMARY, REPORT, TRAINED = "summary.json", "report.html", "trained"


def train_heads(task: Task, objective: HeadMatching, folder: Path) -> TrainResult:
    """Trains to the last step, from the last checkpoint in `folder`."""
    config = task.config
    settings = TrainConfig(
        steps=config.steps,
        learning_rate=config.learning_rate,
        weight_decay=0.0,
        warmup=config.warmup,
        clip_norm=config.clip_norm or None,
        eval_every=config.eval_every,
        early_stop=False,
    )
    return train(
        folder,
        objective,
        settings,
        task.batches,
        task.validation,
        seed=config.seed,
        mesh=task.mesh,
        frozen=task.base.params,
        base_sha256=task.base.identity.text,
        policy=CheckpointPolicy(
            save_every=config.save_every, log_every=10, allow_fallback=config.allow_fallback
        ),
        in_nats=False,
    )


def run(config: DistillConfig, folder: Path) -> DistillSummary:
    """Runs or resumes the training in an open work folder and returns the summary."""
    task = open_task(config, folder)
    manifest = task.prepared.manifest
    record_provenance(
        folder,
        collect_provenance(
            seeds={"distill": config.seed},
            dtype="float32",
            data=hub.identity("model", task.base.identity.text, task.base.revision)
            | {"documents": manifest["documents_sha256"]}
            | dict(manifest["sources"]),
            tokenizer=manifest["tokenizer_sha256"],
        ),
    )
    objective = objective_of(task, folder)
    trained = train_heads(task, objective, folder / TRAIN)
    heads = HybridRecipe(
        version=1,
        model=config.model,
        model_sha256=task.base.identity.text,
        recipe=task.hybrid.recipe if task.hybrid else parse_recipe(config.recipe).spec,
        bias=objective.bias,
        layers=objective.cfg.num_layers,
        heads=objective.cfg.num_heads,
        replaced=objective.replaced,
    )
    shutil.rmtree(folder / TRAINED, ignore_errors=True)
    save_trained(folder / TRAINED, TrainedHeads(heads, config.adapters, dict(trained.state.params)))
    # Adapters change nothing at first, and matrices are the identity: the recipe as it is.
    untrained = params_lib.init(jax.random.key(config.seed), objective.spec)
    before, after = (measure(task, objective, p) for p in (untrained, trained.state.params))
    by_head, losses = head_table(objective, before, after), loss_table(before, after)
    source = read_provenance(folder, config)
    write_table(folder / "rows.parquet", by_head, source)
    write_table(folder / "losses.parquet", losses, source)
    summary = summarise(task, objective, (before, after), (by_head, losses), folder)
    write_json(folder / SUMMARY, summary)
    write_text(folder / REPORT, report.build(summary))
    return summary


def inputs(config: DistillConfig) -> Inputs:
    """The model, the heads and the text of a training."""
    return {
        **identities({"model": config.model}),
        **file_inputs({"config.hybrid": config.hybrid}),
        **corpus_inputs({"config.corpus": config.corpus.source}),
    }


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, DistillConfig)
    opened = open_workdir(
        arguments.folder, arguments.config, resume=arguments.resume, may_change=MAY_CHANGE
    )
    with opened as work:
        given = inputs(config)
        if done := finish_time(work.path, given):
            print(f"finished {done}")
        else:
            run(config, work.path)
            mark_finished(work.path, given)
        print(report.format_summary(load_result(work.path / SUMMARY, DistillSummary)))


if __name__ == "__main__":
    cli.app(main, config="polyattn/distill", config_class=DistillConfig, training=True)

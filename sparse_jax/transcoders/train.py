"""Trains a transcoder on the activations of a model, computed as they are needed.

    iaj sparse transcoder --config=sparse/clt --config.model=MODEL --workdir=runs/clt

The work folder then holds

    data/             the prepared corpus
    scales.json       scales of the activations, measured once (`results.StoredScales`)
    checkpoints/, metrics.parquet, evaluations.parquet    of `lm_jax.train.loop`
    transcoder/       the transcoder of raw activations (`files`)
    report.html       the page, one offline file
    summary.json      `results.TranscoderSummary`, written last

The same command resumes a killed run, which ends with the same parameters.
"""

from collections.abc import Iterator
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import to_jsonable, write_json, write_text
from lm_jax.run.provenance import collect_provenance, read_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.preparation import prepare_corpus
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.evaluate import Evaluation, evaluate
from lm_jax.train.loop import TrainResult, train
from lm_jax.train.metrics import METRICS
from lm_jax.train.objective import ignore_index_batch
from lm_jax.train.step import check_batch, make_eval_step
from lm_jax.weights.load import load_pretrained
from lm_jax.weights.runs import read_run
from sparse_jax import model as sparse_model
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.transcoders import files, report, thresholds
from sparse_jax.transcoders.config import TranscoderTraining
from sparse_jax.transcoders.inputs import Activations, measure_scales, read_activations
from sparse_jax.transcoders.objective import Frozen, Transcoding
from sparse_jax.transcoders.results import (
    Reconstruction,
    StoredScales,
    Substitution,
    TranscoderSummary,
)
from sparse_jax.transcoders.substitution import agreement
from sparse_jax.transcoders.transcoder import Transcoder, spec

DATA, SCALES, TRANSCODER, SUMMARY = "data", "scales.json", "transcoder", "summary.json"
REPORT = "report.html"
# Held-out batches on which MLPs are replaced at each evaluation.
_SUBSTITUTED_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """The model that a transcoder stands for."""

    name: str
    model: CircuitModel
    tokenizer: Tokenizer
    sha256: str

    @classmethod
    def load(
        cls, source: str, *, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
    ) -> "SourceModel":
        """Reads a dense model, a sparse one with its gates, or a trained run (`weights.runs`).

        Raises:
          UsageError: no model is named.
          BadInputError: there is no such model, or it has no tokenizer or no MLP.
        """
        if not source:
            raise UsageError("config.model is empty; name a folder or a model of the manifest")
        if (Path(source) / sparse_model.SPARSE).is_file():
            loaded = sparse_model.load(source, dtype=jnp.dtype(dtype), mesh=mesh)
            model, base = CircuitModel.of(loaded), loaded.base
        elif base := read_run(source, mesh):
            model = CircuitModel.of(base)
            params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), model.params)
            model = dataclasses.replace(model, params=params)
        else:
            base = load_pretrained(source, dtype=jnp.dtype(dtype), mesh=mesh)
            model = CircuitModel.of(base)
        if base.tokenizer is None:
            raise BadInputError(
                f"model {source!r} has no tokenizer; put its tokenizer.json beside the weights"
            )
        if not base.cfg.mlp_size:
            raise BadInputError(f"model {source!r} has no MLPs that a transcoder could stand for")
        return cls(source, model, base.tokenizer, base.sha256)


def run(config: TranscoderTraining, folder: Path) -> TranscoderSummary:
    """Trains or resumes in an open work folder and returns the summary.

    Raises:
      As `SourceModel.load` and `lm_jax.train.loop.train`.
    """
    data, fsdp, tensor = config.mesh
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    check_batch(config.batch_size, config.accumulate, mesh)
    source = SourceModel.load(config.model, dtype=config.dtype, mesh=mesh)
    cfg = source.model.cfg
    if config.context > cfg.max_length:
        raise UsageError(
            f"config.context = {config.context} is beyond the {cfg.max_length} positions of "
            f"{config.model}; lower it"
        )
    prepared = prepare_corpus(folder / DATA, config.corpus, tokenizer=source.tokenizer)
    manifest = prepared.manifest
    origin = collect_provenance(
        seeds={"run": config.seed},
        dtype=config.dtype,
        data={"documents": manifest["documents_sha256"]} | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    processes.on_first(lambda: record_provenance(folder, origin))
    index, count = sharding.batch_share(mesh)
    share = {
        "batch_size": config.batch_size,
        "process_index": index,
        "process_count": count,
    }
    windows = functools.partial(
        Examples, prepared, context=config.context, mode="window", vocab_size=cfg.vocab_size
    )
    batches = Batches(windows("train"), seed=config.seed, **share)
    validation = OnePass(windows("validation", limit=config.validation_documents), **share)
    frozen = _frozen(config, source, batches, folder)
    objective = Transcoding(
        config.sizes(cfg.num_layers, cfg.hidden_size),
        config.penalties,
        steps=config.steps,
        skip_start=config.skip_start,
        outlier=config.outlier,
        dtype=config.dtype,
    )
    look = _Look(config, objective, frozen, batches, validation)
    result = train(
        folder,
        objective,
        config.train,
        batches,
        validation,
        seed=config.seed,
        mesh=mesh,
        frozen=frozen,
        base_sha256=source.sha256,
        policy=CheckpointPolicy(save_every=config.save_every, allow_fallback=config.allow_fallback),
        params=_start(config, objective, frozen, batches),
        measure=lambda params, step, evaluation: (
            Reconstruction.of(evaluation).numbers()
            | look.substitution(look.exported(params)).numbers()
        ),
        in_nats=False,
    )
    summary = _export(config, source, look, result, mesh, folder)
    processes.on_first(lambda: _conclude(config, summary, folder))
    return load_result(folder / SUMMARY, TranscoderSummary)


def _conclude(config: TranscoderTraining, summary: TranscoderSummary, folder: Path) -> None:
    origin = to_jsonable(read_provenance(folder))
    write_text(folder / REPORT, report.build(config, summary, folder, provenance=origin))
    write_json(folder / SUMMARY, summary)


def _activations(
    config: TranscoderTraining, frozen: Frozen, batches: Batches, count: int
) -> Iterator[Activations]:
    """The activations of the first batches, on every process those of the whole batch."""

    @jax.jit
    def read(frozen: Frozen, tokens_BS: jax.Array) -> Activations:
        batch = ignore_index_batch(tokens_BS)
        limits = {"skip_start": config.skip_start, "outlier": config.outlier}
        return read_activations(frozen.model, frozen.scales, batch, **limits)

    for k in range(count):
        yield read(frozen, jnp.asarray(processes.gather(batches.at(k)["tokens"])))


def _frozen(
    config: TranscoderTraining, source: SourceModel, batches: Batches, folder: Path
) -> Frozen:
    """The model and the scales of its activations, which are read back where they are stored.

    Raises:
      BadInputError: they were measured on another model.
    """
    file = folder / SCALES

    def measure() -> None:
        if file.exists():
            return
        rows = (batches.at(k)["tokens"] for k in range(config.scale_batches))
        scales = measure_scales(
            source.model,
            (ignore_index_batch(jnp.asarray(each)) for each in rows),
            skip_start=config.skip_start,
        )
        write_json(file, StoredScales.of(scales, source.sha256))

    processes.on_first(measure)
    stored = load_result(file, StoredScales)
    if stored.model_sha256 != source.sha256:
        raise BadInputError(
            f"{source.name} has weights of sha256 {source.sha256[:12]}, and {file} is of "
            f"{stored.model_sha256[:12]}; put those back, or choose another --workdir"
        )
    return Frozen(source.model, stored.scales)


def _start(
    config: TranscoderTraining, objective: Transcoding, frozen: Frozen, batches: Batches
) -> ParamTree:
    """Initial parameters: random weights, and biases by which features fire at the wanted rate."""
    drawn = params_lib.init(jax.random.key(config.seed), spec(objective.cfg))
    count = min(config.scale_batches, 5)
    read = _activations(config, frozen, batches, count)
    return thresholds.initial_biases(Transcoder(drawn, objective.cfg), read, config.firing_rate)


@dataclasses.dataclass(frozen=True)
class _Look:
    """What evaluations beyond the loss read."""

    config: TranscoderTraining
    objective: Transcoding
    frozen: Frozen
    batches: Batches
    validation: OnePass

    def with_thresholds(self, params: ParamTree) -> Transcoder:
        """The transcoder of scaled activations, with thresholds in place of BatchTopK."""
        trained = Transcoder(params, self.objective.cfg)
        if self.config.kind != "batchtopk":
            return trained
        read = _activations(self.config, self.frozen, self.batches, self.config.scale_batches)
        trained = thresholds.from_batch_topk(trained, read, self.config.penalties.active)
        return Transcoder(trained.params, dataclasses.replace(trained.cfg, kind="jumprelu"))

    def exported(self, params: ParamTree) -> Transcoder:
        """The transcoder of raw activations."""
        scales = self.frozen.scales
        return self.with_thresholds(params).folded(scales.input_L, scales.output_L)

    def substitution(self, exported: Transcoder) -> Substitution:
        """Predictions with all MLPs replaced, on the first held-out batches."""
        sums = []
        for k in range(min(_SUBSTITUTED_BATCHES, self.validation.per_epoch)):
            tokens_BS = jnp.asarray(processes.gather(self.validation.at(k)["tokens"]))
            batch = ignore_index_batch(tokens_BS)
            first = jnp.arange(batch.input_BT.shape[1]) >= self.config.skip_start
            replaced_BT = jnp.broadcast_to(first[None], batch.input_BT.shape)
            valid_BT = batch.input_mask_BT
            model = self.frozen.model
            sums.append(agreement(model, exported, batch.input_BT, valid_BT, replaced_BT))
        return Substitution.of(sums)


def _export(
    config: TranscoderTraining,
    source: SourceModel,
    look: _Look,
    result: TrainResult,
    mesh: jax.sharding.Mesh,
    folder: Path,
) -> TranscoderSummary:
    """Sets thresholds, evaluates, and writes the transcoder of raw activations."""

    def evaluated(objective: Transcoding, params: ParamTree) -> Evaluation:
        step = make_eval_step(objective, mesh)
        return evaluate(step, params, look.validation, mesh, frozen=look.frozen, stoppable=True)

    objective, batch_topk = look.objective, None
    last = evaluated(objective, result.state.params)
    if config.kind == "batchtopk":
        batch_topk = Reconstruction.of(last)
        final = look.with_thresholds(result.state.params)
        params = jax.device_put(final.params, sharding.param_shardings(mesh, spec(final.cfg)))
        last = evaluated(dataclasses.replace(objective, cfg=final.cfg), params)
    exported = look.exported(result.state.params)
    reconstruction = Reconstruction.of(last)
    silent_LF = result.state.aux_state.silent_LF
    summary = TranscoderSummary(
        model=source.name,
        model_sha256=source.sha256,
        family=source.model.cfg.family,
        kind=config.kind,
        window=objective.cfg.window,
        features=config.features,
        parameters=params_lib.count(objective.spec),
        steps=int(result.state.step),
        tokens_seen=int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py()),
        validation_tokens=last.tokens,
        reconstruction=reconstruction,
        batch_topk=batch_topk,
        substitution=look.substitution(exported),
        dead=float(jnp.mean(silent_LF >= config.penalties.silent_steps)),
        device=jax.devices()[0].device_kind,
    )

    def write() -> None:
        if (folder / TRANSCODER).exists():
            return
        numbers = {"l0": reconstruction.l0, "unexplained": reconstruction.unexplained}
        host = Transcoder(weights, exported.cfg)
        files.save(folder / TRANSCODER, host, files.Origin(source.name, source.sha256, numbers))

    weights = sharding.fetch(exported.params)
    processes.on_first(write)
    return summary

"""Trains a transcoder on the activations of a model, computed as they are needed.

Besides what every study has, the work folder holds

    data/             the prepared corpus
    scales.json       scales of the activations, measured once (`results.StoredScales`)
    checkpoints/, metrics.parquet, evaluations.parquet    of `lm_jax.train.loop`
    transcoder/       the transcoder of raw activations (`files`)
    per_layer/        with `config.control` the same of the per-layer transcoder, but for the corpus

Evaluations measure activity, errors and predictions with all MLPs replaced (`measure`), and every
`scores_every` steps scores of attribution graphs on a fixed set of prompts (`scores`).
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.run.files import write_json
from lm_jax.run.finished import NO_INPUTS, Inputs
from lm_jax.run.identity import difference
from lm_jax.run.results import load_result
from lm_jax.study import Work, frame
from lm_jax.text.corpora import corpus_inputs
from lm_jax.text.examples import Batches, Examples, OnePass
from lm_jax.text.preparation import prepare_on_first
from lm_jax.text.prepared import Prepared
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.loop import Hooks, TrainResult, TrainRun, train
from lm_jax.train.metrics import METRICS
from lm_jax.train.step import check_batch
from lm_jax.weights import hub
from lm_jax.weights.load import is_there
from sparse_jax.circuits.source_model import SourceModel, open_source
from sparse_jax.studies.transcoders import STUDY
from sparse_jax.studies.transcoders.measure import Measurements, Text
from sparse_jax.studies.transcoders.numbers import as_control
from sparse_jax.studies.transcoders.results import (
    Control,
    Reconstruction,
    StoredScales,
    TranscoderSummary,
)
from sparse_jax.studies.transcoders.settings import TranscoderTraining
from sparse_jax.transcoders import files, thresholds
from sparse_jax.transcoders.inputs import measure_scales
from sparse_jax.transcoders.objective import Frozen, Transcoding
from sparse_jax.transcoders.transcoder import Transcoder, equal_features, spec

DATA, SCALES, TRANSCODER = "data", "scales.json", "transcoder"
PER_LAYER = "per_layer"


def inputs(config: TranscoderTraining) -> Inputs:
    """The model and the text of a training.

    Raises:
      UsageError: no model is named, or it has too few positions.
    """
    text = corpus_inputs({"config.corpus": config.corpus.source})
    if config.model and not is_there(config.model):
        return text
    source = open_source(config.model)
    if config.context > source.cfg.max_length:
        raise UsageError(
            f"config.context = {config.context} is beyond the {source.cfg.max_length} positions of "
            f"{config.model}; lower it"
        )
    return {"model": source.identity.text} | text


def train_and_measure(
    config: TranscoderTraining, work: Work, task: "_Task | None" = None
) -> TranscoderSummary:
    """Trains or resumes it, writes the transcoder, and measures it.

    Args:
      config: the settings.
      work: the open work folder.
      task: the model and the text of the training that this one is a control of.

    Raises:
      As `SourceModel.load` and `lm_jax.train.loop.train`.
    """
    task = task or _Task.open(config, work.path)
    work.record(**task.origin)
    trained = task.train(config, work.path)
    controls: tuple[Control, ...] = ()
    if config.control:
        sizes = trained.measurements.objective.cfg
        other = dataclasses.replace(
            config, window=1, features=equal_features(sizes, 1), control=False
        )
        part = frame.run_part(STUDY, other, work.part(PER_LAYER), NO_INPUTS, task=task)
        controls = (as_control(part),)
    return task.conclude(trained, controls)


@dataclasses.dataclass(frozen=True)
class _Trained:
    """A trained transcoder, in its folder, with what measures it."""

    folder: Path
    measurements: Measurements
    result: TrainResult


@dataclasses.dataclass(frozen=True)
class _Task:
    """What all transcoders of a run share: the model, the text, the devices."""

    source: SourceModel
    prepared: Prepared
    mesh: jax.sharding.Mesh

    @classmethod
    def open(cls, config: TranscoderTraining, folder: Path) -> "_Task":
        """Loads the model, and prepares the text in the work folder."""
        mesh = sharding.make_mesh(*config.mesh)
        # Not among the inputs: what has finished can be shown on a machine with fewer devices.
        check_batch(config.batch_size, config.accumulate, mesh)
        source = SourceModel.load(config.model, dtype=config.dtype, mesh=mesh)
        prepared = prepare_on_first(folder / DATA, config.corpus, tokenizer=source.tokenizer)
        return cls(source, prepared, mesh)

    @property
    def origin(self) -> dict[str, Any]:
        """What the provenance says of the model and the text."""
        manifest, source = self.prepared.manifest, self.source
        return {
            "data": hub.identity("model", source.identity.text, source.revision)
            | {"documents": manifest["documents_sha256"]}
            | dict(manifest["sources"]),
            "tokenizer": manifest["tokenizer_sha256"],
        }

    def train(self, config: TranscoderTraining, folder: Path) -> _Trained:
        """Trains, or resumes training, in a folder."""
        cfg = self.source.model.cfg
        size, share = config.batch_size, sharding.own_block(self.mesh, config.batch_size)
        windows = functools.partial(
            Examples,
            self.prepared,
            context=config.context,
            mode="window",
            vocab_size=cfg.vocab_size,
        )
        train_windows = windows("train")
        held_out = windows("validation", limit=config.validation_documents)
        batches = Batches(train_windows, seed=config.seed, **share)
        validation = OnePass(held_out, **share)
        text = Text(
            Batches(train_windows, batch_size=size, seed=config.seed),
            OnePass(held_out, batch_size=size),
            self.mesh,
        )
        frozen = _frozen(config, self.source, text, folder)
        objective = Transcoding(
            config.sizes(cfg.num_layers, cfg.hidden_size),
            config.penalties,
            steps=config.steps,
            skip_start=config.skip_start,
            outlier=config.outlier,
            dtype=config.dtype,
        )
        measurements = Measurements.of(
            config, objective, self.mesh, frozen, text, validation, self.source.tokenizer
        )
        result = train(
            folder,
            TrainRun(
                objective=objective,
                config=config.train,
                batches=batches,
                validation=validation,
                seed=config.seed,
                frozen=frozen,
                base_sha256=self.source.identity.text,
                params=functools.partial(_start, config, objective, frozen, text),
                in_nats=False,
            ),
            self.mesh,
            CheckpointPolicy(save_every=config.save_every, allow_fallback=config.allow_fallback),
            Hooks(
                measure=measurements.numbers,
                done=measurements.ends if config.stop_l0 else None,
            ),
        )
        return _Trained(folder, measurements, result)

    def conclude(self, trained: _Trained, controls: tuple[Control, ...] = ()) -> TranscoderSummary:
        """Sets thresholds, evaluates, and writes the transcoder."""
        measurements, state, folder = trained.measurements, trained.result.state, trained.folder
        config, objective = measurements.config, measurements.objective
        final = measurements.with_thresholds(state.params)
        evaluation = measurements.evaluated(final)
        reconstruction = Reconstruction.of(evaluation)
        batch_topk = batch_topk_graphs = None
        if config.kind == "batchtopk":
            before = Transcoder(state.params, objective.cfg)
            batch_topk = Reconstruction.of(measurements.evaluated(before))
            batch_topk_graphs = measurements.scores_before_thresholds(state.params)
        exported, neurons = measurements.folded(final), measurements.neurons()
        silent_LF = state.aux_state.silent_LF
        summary = TranscoderSummary(
            model=self.source.name,
            model_sha256=self.source.sha256,
            family=self.source.model.cfg.family,
            kind=config.kind,
            window=objective.cfg.window,
            features=config.features,
            parameters=params_lib.count(objective.spec),
            steps=int(state.step),
            tokens_seen=int(pc.sum(pq.read_table(folder / METRICS)["tokens"]).as_py()),
            ended="l0" if trained.result.history.stopped_early else "steps",
            validation_tokens=evaluation.tokens,
            reconstruction=reconstruction,
            batch_topk=batch_topk,
            substitution=measurements.substitution(exported),
            graphs=measurements.scores(exported),
            controls=(
                *controls,
                measurements.shuffled(final),
                neurons,
                *measurements.largest_neurons(exported, neurons),
            ),
            dead=float(jnp.mean(silent_LF >= config.penalties.silent_steps)),
            device=jax.devices()[0].device_kind,
            batch_topk_graphs=batch_topk_graphs,
        )
        host = dataclasses.replace(exported, params=sharding.fetch(exported.params))

        def write() -> None:
            if not (folder / TRANSCODER).exists():
                numbers = {"l0": reconstruction.l0, "unexplained": reconstruction.unexplained}
                origin = files.Origin(self.source.name, self.source.identity.text, numbers)
                files.save(folder / TRANSCODER, host, origin)

        processes.on_first(write)
        return summary


def _frozen(config: TranscoderTraining, source: SourceModel, text: Text, folder: Path) -> Frozen:
    """The model and the scales of its activations, which are read back where they are stored.

    All processes measure them, as the model is on the devices of all, and the first writes.

    Raises:
      BadInputError: they were measured on another model.
    """
    file = folder / SCALES
    if not processes.on_first(lambda: int(file.exists())):
        first = (text.batch(text.train, k) for k in range(config.scale_batches))
        scales = measure_scales(source.model, first, skip_start=config.skip_start)
        processes.on_first(lambda: write_json(file, StoredScales.of(scales, source.identity.text)))
    stored = load_result(file, StoredScales)
    if change := difference(stored.model_sha256, source.identity.text, where=file):
        raise BadInputError(
            f"{file} is of another model than {source.name}, with {change}; put that back, or "
            "choose another --workdir"
        )
    return Frozen(source.model, stored.scales)


def _start(
    config: TranscoderTraining, objective: Transcoding, frozen: Frozen, text: Text
) -> ParamTree:
    """Initial parameters: random weights, and biases by which features fire at the wanted rate.

    Each device draws its own part of them.
    """
    declared = spec(objective.cfg)
    draw = jax.jit(
        functools.partial(params_lib.init, spec=declared),
        out_shardings=sharding.param_shardings(text.mesh, declared),
    )
    drawn = draw(jax.random.key(config.seed))
    count = min(config.scale_batches, 5)
    read = text.first_activations(config, frozen, count)
    return thresholds.initial_biases(Transcoder(drawn, objective.cfg), read, config.firing_rate)

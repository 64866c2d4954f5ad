"""What evaluations of a transcoder measure beyond its loss, in training and at its end.

Errors and activity on held-out text, predictions of the model with its MLPs replaced, scores of
attribution graphs; and the same of controls that need no training: decoders in random order, the
hidden units of the MLPs themselves, and as many of them as the transcoder has active features.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.parallel import sharding
from lm_jax.text.examples import Batches, OnePass
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.train.evaluate import Evaluation, evaluate
from lm_jax.train.objective import LMBatch, ignore_index_batch
from lm_jax.train.step import make_eval_step
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.studies.transcoders import neurons
from sparse_jax.studies.transcoders.results import (
    Control,
    PromptScores,
    Reconstruction,
    Substitution,
)
from sparse_jax.studies.transcoders.scores import PromptSet, score_prompts, with_largest
from sparse_jax.studies.transcoders.settings import TranscoderTraining
from sparse_jax.transcoders import thresholds
from sparse_jax.transcoders.inputs import Activations, read_activations
from sparse_jax.transcoders.objective import Frozen, Transcoding
from sparse_jax.transcoders.substitution import agreement
from sparse_jax.transcoders.transcoder import Transcoder, shuffled, spec

# Held-out batches on which MLPs are replaced at each evaluation.
_SUBSTITUTED_BATCHES = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Batches of which each process reads all rows, in order; training shares them.

    Attributes:
      train, held_out: batches of the two splits.
      mesh: devices, each of which gets all rows.
    """

    train: Batches
    held_out: OnePass
    mesh: jax.sharding.Mesh

    def batch(self, batches: Batches | OnePass, k: int) -> LMBatch:
        """Batch k of one of them."""
        place = sharding.replicated(self.mesh)
        return ignore_index_batch(jax.device_put(batches.at(k)["tokens"], place))

    def held_out_batches(self) -> Iterator[LMBatch]:
        """All held-out batches."""
        return (self.batch(self.held_out, k) for k in range(self.held_out.per_epoch))

    def first_activations(
        self, config: TranscoderTraining, frozen: Frozen, count: int
    ) -> Iterator[Activations]:
        """The activations of the first batches of training."""
        limits = {"skip_start": config.skip_start, "outlier": config.outlier}
        for k in range(count):
            yield _read(frozen, self.batch(self.train, k), **limits)


@functools.partial(exact_jit, static_argnames=("skip_start", "outlier"))
def _read(frozen: Frozen, batch: LMBatch, **limits: Any) -> Activations:
    return read_activations(frozen.model, frozen.scales, batch, **limits)


@dataclasses.dataclass(frozen=True, eq=False)
class Measurements:
    """Measurements of the transcoders of one run.

    Attributes:
      config, objective, mesh: settings, loss and devices of the run.
      frozen: the model and its scales, on the mesh.
      text: text of training and held-out text.
      validation: this process's rows of the held-out text.
      prompts: prompts of the graphs.
      local: the model on one device of this process; graphs are not split.
    """

    config: TranscoderTraining
    objective: Transcoding
    mesh: jax.sharding.Mesh
    frozen: Frozen
    text: Text
    validation: OnePass
    prompts: PromptSet
    local: CircuitModel

    @classmethod
    def of(
        cls,
        config: TranscoderTraining,
        objective: Transcoding,
        mesh: jax.sharding.Mesh,
        frozen: Frozen,
        text: Text,
        validation: OnePass,
        tokenizer: Tokenizer,
    ) -> "Measurements":
        """The measurements, with the prompts that the config names.

        Raises:
          BadInputError: there is no prompt of the wanted length.
        """
        if config.prompts:
            prompts = PromptSet.of_texts(config.prompts, tokenizer, length=config.score_tokens)
        else:
            held_out = text.held_out
            prompts = PromptSet.of_windows(
                (held_out.at(k)["tokens"] for k in range(held_out.per_epoch)),
                count=config.score_prompts,
                length=config.score_tokens,
            )
        model = frozen.model
        local = dataclasses.replace(model, params=_on_one_device(model.params))
        return cls(config, objective, mesh, frozen, text, validation, prompts, local)

    def ends(self, evaluation: Evaluation) -> bool:
        """Whether so few features are active that training ends (`stop_l0`)."""
        active_L = evaluation.sums["active_L"] / evaluation.tokens
        return float(np.mean(active_L)) <= self.config.stop_l0

    def numbers(self, params: ParamTree, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Numbers of an evaluation in training, by name."""
        exported = self.folded(self.with_thresholds(params))
        numbers = Reconstruction.of(evaluation).numbers()
        numbers |= self.substitution(exported).numbers()
        every, last = self.config.scores_every, step == self.config.steps
        # The first evaluation at or after each multiple; the last step is one in any case.
        due = every and step // every > (step - self.config.eval_every) // every
        if last or due or self.ends(evaluation):
            numbers |= self.scores(exported).numbers()
        return numbers

    def with_thresholds(self, params: ParamTree) -> Transcoder:
        """The transcoder of scaled activations, with thresholds in place of BatchTopK."""
        trained = Transcoder(params, self.objective.cfg)
        if self.config.kind != "batchtopk":
            return trained
        count = self.config.scale_batches
        read = self.text.first_activations(self.config, self.frozen, count)
        trained = thresholds.from_batch_topk(trained, read, self.config.penalties.active)
        return Transcoder(trained.params, dataclasses.replace(trained.cfg, kind="jumprelu"))

    def folded(self, scaled: Transcoder) -> Transcoder:
        """The transcoder of raw activations, with the first tokens that training left out."""
        own = scaled.folded(self.frozen.scales.input_L, self.frozen.scales.output_L)
        return dataclasses.replace(own, skip_start=self.config.skip_start)

    def evaluated(self, scaled: Transcoder) -> Evaluation:
        """The sums of `Transcoding.evaluate` on held-out text."""
        step = make_eval_step(dataclasses.replace(self.objective, cfg=scaled.cfg), self.mesh)
        places = sharding.param_shardings(self.mesh, spec(scaled.cfg))
        params = jax.device_put(scaled.params, places)
        frozen = self.frozen
        return evaluate(step, params, self.validation, self.mesh, frozen=frozen, stoppable=True)

    def substitution(self, exported: Transcoder) -> Substitution:
        """Predictions with all MLPs replaced, on the first held-out batches."""
        return Substitution.of(
            [
                agreement(
                    self.frozen.model, exported, batch.input_BT, batch.input_mask_BT, replaced_BT
                )
                for batch, replaced_BT in self._held_out()
            ]
        )

    def scores(self, exported: Transcoder) -> PromptScores:
        """Scores of graphs, in every process all of them."""
        most = self.config.score_features
        return score_prompts(self.local, _local(exported), self.prompts, max_features=most)

    def scores_before_thresholds(self, params: ParamTree) -> PromptScores:
        """The same of BatchTopK, with all prompts as one batch."""
        trained = _local(self.folded(Transcoder(params, self.objective.cfg)))
        kept = with_largest(
            self.local,
            trained,
            self.prompts,
            active=self.config.penalties.active,
            skip_start=self.config.skip_start,
        )
        return self.scores(kept)

    def shuffled(self, scaled: Transcoder) -> Control:
        """The transcoder with the decoders of each layer's features in random order."""
        mixed = shuffled(scaled, self.config.seed)
        reconstruction = Reconstruction.of(self.evaluated(mixed))
        exported = self.folded(mixed)
        return Control(
            name="shuffled",
            features=scaled.cfg.features,
            parameters=params_lib.count(spec(scaled.cfg)),
            l0=reconstruction.l0,
            unexplained=reconstruction.unexplained,
            substitution=self.substitution(exported),
            graphs=self.scores(exported),
        )

    def neurons(self) -> Control:
        """The hidden units of the MLPs, of which those count as active that are not zero."""
        active = tokens = 0
        for batch, replaced_BT in self._held_out():
            active += int(_active_units(self.frozen.model, batch, replaced_BT))
            tokens += int(replaced_BT.sum())
        cfg = self.frozen.model.cfg
        mlp = self.frozen.model.params["blocks"]["mlp"]
        return Control(
            name="neurons",
            features=cfg.mlp_size,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(mlp)),
            l0=active / tokens,
            unexplained=0.0,
            substitution=None,
            graphs=None,
        )

    def largest_neurons(self, exported: Transcoder, every: Control) -> tuple[Control, ...]:
        """The largest neurons, as many as the transcoder has active features of each token.

        None where a norm follows MLPs, after which a neuron writes nothing of its own.
        """
        cfg = self.frozen.model.cfg
        if "ln2_post" in cfg.norm_names:
            return ()
        reconstruction = neurons.reconstruct(
            self.frozen,
            exported,
            self.text.held_out_batches(),
            skip_start=self.config.skip_start,
            outlier=self.config.outlier,
        )
        local = _local(exported)
        graphs = score_prompts(
            self.local,
            local,
            self.prompts,
            max_features=self.config.score_features,
            basis=neurons.largest_neurons(self.local, local),
        )
        control = dataclasses.replace(
            every,
            name="largest_neurons",
            l0=reconstruction.l0,
            unexplained=reconstruction.unexplained,
            graphs=graphs,
        )
        return (control,)

    def _held_out(self) -> Iterator[tuple[LMBatch, jax.Array]]:
        """The first held-out batches, and which of their tokens have their MLPs replaced: those
        that training does not leave out."""
        limits = {"skip_start": self.config.skip_start, "outlier": self.config.outlier}
        for batch in itertools.islice(self.text.held_out_batches(), _SUBSTITUTED_BATCHES):
            replaced_BT = _read(self.frozen, batch, **limits).mask_X.reshape(batch.input_BT.shape)
            yield batch, jax.device_put(replaced_BT, sharding.replicated(self.mesh))


def _local(transcoder: Transcoder) -> Transcoder:
    return dataclasses.replace(transcoder, params=_on_one_device(transcoder.params))


def _on_one_device(params: ParamTree) -> ParamTree:
    return jax.device_put(sharding.fetch(params), jax.local_devices()[0])


@exact_jit
def _active_units(model: CircuitModel, batch: LMBatch, kept_BT: jax.Array) -> jax.Array:
    """Hidden units that are not zero, summed over layers and the tokens that count."""
    records = model.forward(
        batch.input_BT, batch.input_mask_BT, record={neurons.HIDDEN: _count_units}
    ).records
    return jnp.sum(jnp.where(kept_BT[None], records[neurons.HIDDEN], 0))


def _count_units(h_BTF: jax.Array) -> jax.Array:
    return (h_BTF != 0).sum(-1)

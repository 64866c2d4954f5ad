"""What evaluations of a transcoder measure beyond its loss, in training and at its end.

Errors and activity on held-out text, predictions of the model with its MLPs replaced, scores of
attribution graphs; and the same of two controls that need no training: decoders in random order,
and the hidden units of the MLPs themselves.
"""

from collections.abc import Iterator
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model import params as params_lib
from lm_jax.model.params import ParamTree
from lm_jax.parallel import sharding
from lm_jax.run import processes
from lm_jax.text.examples import Batches, OnePass
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.train.evaluate import Evaluation, evaluate
from lm_jax.train.objective import LMBatch, ignore_index_batch
from lm_jax.train.step import make_eval_step
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.transcoders import thresholds
from sparse_jax.transcoders.config import TranscoderTraining
from sparse_jax.transcoders.inputs import Activations, read_activations
from sparse_jax.transcoders.objective import Frozen, Transcoding
from sparse_jax.transcoders.results import Control, PromptScores, Reconstruction, Substitution
from sparse_jax.transcoders.scores import PromptSet, score_prompts
from sparse_jax.transcoders.substitution import agreement
from sparse_jax.transcoders.transcoder import Transcoder, shuffled, spec

# Held-out batches on which MLPs are replaced at each evaluation.
_SUBSTITUTED_BATCHES = 4
_UNITS = "mlp.post"


def first_activations(
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


@dataclasses.dataclass(frozen=True, eq=False)
class Measurements:
    """Measurements of the transcoders of one run.

    Attributes:
      config, objective, mesh: of the run.
      frozen: the model and its scales, on the mesh.
      batches, validation: text of training, and held-out text.
      prompts: of the graphs.
      local: the model on one device of this process; graphs are not split.
    """

    config: TranscoderTraining
    objective: Transcoding
    mesh: jax.sharding.Mesh
    frozen: Frozen
    batches: Batches
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
        batches: Batches,
        validation: OnePass,
        tokenizer: Tokenizer,
    ) -> "Measurements":
        """With the prompts that the config names.

        Raises:
          BadInputError: there is no prompt of the wanted length.
        """
        if config.prompts:
            prompts = PromptSet.of_texts(config.prompts, tokenizer, length=config.score_tokens)
        else:
            prompts = PromptSet.of_windows(
                (
                    np.asarray(processes.gather(validation.at(k)["tokens"]))
                    for k in range(validation.per_epoch)
                ),
                count=config.score_prompts,
                length=config.score_tokens,
            )
        model = frozen.model
        local = dataclasses.replace(model, params=_on_one_device(model.params))
        return cls(config, objective, mesh, frozen, batches, validation, prompts, local)

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
        read = first_activations(self.config, self.frozen, self.batches, count)
        trained = thresholds.from_batch_topk(trained, read, self.config.penalties.active)
        return Transcoder(trained.params, dataclasses.replace(trained.cfg, kind="jumprelu"))

    def folded(self, scaled: Transcoder) -> Transcoder:
        """The transcoder of raw activations."""
        return scaled.folded(self.frozen.scales.input_L, self.frozen.scales.output_L)

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
        local = Transcoder(_on_one_device(exported.params), exported.cfg)
        most = self.config.score_features
        return score_prompts(self.local, local, self.prompts, max_features=most)

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
            counted_BT = batch.input_mask_BT & replaced_BT
            active += int(_active_units(self.frozen.model, batch, counted_BT))
            tokens += int(counted_BT.sum())
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

    def _held_out(self) -> Iterator[tuple[LMBatch, jax.Array]]:
        """The first held-out batches, and which of their tokens have their MLPs replaced."""
        for k in range(min(_SUBSTITUTED_BATCHES, self.validation.per_epoch)):
            tokens_BS = jnp.asarray(processes.gather(self.validation.at(k)["tokens"]))
            batch = ignore_index_batch(tokens_BS)
            first = jnp.arange(batch.input_BT.shape[1]) >= self.config.skip_start
            yield batch, jnp.broadcast_to(first[None], batch.input_BT.shape)


def _on_one_device(params: ParamTree) -> ParamTree:
    return jax.device_put(sharding.fetch(params), jax.local_devices()[0])


@jax.jit
def _active_units(model: CircuitModel, batch: LMBatch, counted_BT: jax.Array) -> jax.Array:
    """Hidden units that are not zero, summed over layers and the tokens that count."""
    records = model.forward(
        batch.input_BT, batch.input_mask_BT, record={_UNITS: _count_units}
    ).records
    return jnp.sum(jnp.where(counted_BT[None], records[_UNITS], 0))


def _count_units(h_BTF: jax.Array) -> jax.Array:
    return (h_BTF != 0).sum(-1)

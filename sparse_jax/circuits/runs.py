"""Runs of a model on the prompts of a task: the metric of each prompt, under edits, with records.

    model, batch = CircuitModel.of(sparse), Batch.of(task)
    clean_B, records = measure(model, batch, batch.clean_BT, record={"attn.z": lm_jax.keep})

The same functions serve a dense model (`Pretrained`) and one with gates (`SparseModel`), whose
gates are computed in each run from the edited activations.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.attention import softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward
from lm_jax.model.edits import Chain
from lm_jax.model.mixers import ATTENTION, Mixer
from lm_jax.model.precision import exact_jit
from lm_jax.run.processes import call_stoppable
from lm_jax.weights.load import Pretrained
from lm_jax.weights.runs import TrainedRun
from sparse_jax.circuits.metrics import METRICS, Continuations
from sparse_jax.circuits.rules import EXACT, GradientRules
from sparse_jax.circuits.tasks import Task
from sparse_jax.gates.model import Gates, SparseModel, gated_forward


@struct.dataclass
class CircuitModel:
    """A dense or sparse model whose weights and gates are traced in compiled functions.

    A model of another `mixer` than attention has no gates.
    """

    params: Any
    cfg: DecoderConfig = struct.field(pytree_node=False)
    gates: Gates | None = None
    mixer: Mixer = struct.field(pytree_node=False, default=ATTENTION)

    @classmethod
    def of(cls, model: Pretrained | SparseModel | TrainedRun) -> "CircuitModel":
        """The model with its gates, if it has any.

        Raises:
          UsageError: its layers differ in shape, or its blocks go on after their MLP.
        """
        model.cfg.check_equal_blocks("model: a circuit, graph or transcoder")
        if isinstance(model, SparseModel):
            return cls(model.params, model.cfg, model.gates)
        if isinstance(model, Pretrained):
            return cls(model.params, model.cfg)
        return cls(model.params, model.cfg, mixer=model.mixer)

    def above(self, layer: int) -> "CircuitModel":
        """The layers from this one on, as a model whose embedding is to be replaced."""
        cfg = dataclasses.replace(
            self.cfg, num_layers=self.cfg.num_layers - layer, windows=self.cfg.windows[layer:]
        )
        blocks = jax.tree.map(lambda leaf: leaf[layer:], self.params["blocks"])
        gates = self.gates
        if gates is not None:
            gates = dataclasses.replace(gates, bias_LN=gates.bias_LN[layer:])
        return CircuitModel(self.params | {"blocks": blocks}, cfg, gates, self.mixer)

    def forward(
        self,
        tokens_BT: jax.Array,
        valid_BT: jax.Array,
        *,
        rules: GradientRules | None = None,
        edits: Mapping[str, Any] | None = None,
        record: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Output:
        """The forward pass; `rules` decide its derivative, the rest is as in `lm_jax.forward`.

        Without rules, gates are computed by the kernel, whose derivative is used in training.
        """
        options |= {"edits": dict(edits or {}), "record": record or {}}
        if rules is None and self.gates is not None:
            return gated_forward(
                self.params, tokens_BT, self.cfg, self.gates, valid_BT=valid_BT, **options
            )
        attend: Any = softmax
        if rules is not None:
            own, gates = options["edits"], self.gates
            for site, edit in rules.edits(self.cfg, {*own, *options["record"]}).items():
                # The rule last: it is of the value that is used, as it was edited.
                own[site] = Chain((own[site], edit)) if site in own else edit
            gated = None if gates is None else gates.attend(self.cfg, valid_BT=valid_BT)
            attend = rules.attend(gated)
        options |= {"mixer": self.mixer, "valid_BT": valid_BT}
        return forward(self.params, tokens_BT, self.cfg, attend=attend, **options)


@struct.dataclass
class HeldGates:
    """A sparse model whose gates are constants where it is differentiated.

    A small step opens and closes no gate, while the model's own forward pass differentiates
    straight through them, as training does. The lenses of `lm_jax.inspect` take it.
    """

    model: CircuitModel

    @property
    def params(self) -> Any:
        """Parameters of the decoder."""
        return self.model.params

    @property
    def cfg(self) -> DecoderConfig:
        """Configuration of the decoder."""
        return self.model.cfg

    def forward(self, tokens_BT: jax.Array, valid_BT: jax.Array, **options: Any) -> Output:
        """The forward pass; options are those of `lm_jax.forward`."""
        return self.model.forward(tokens_BT, valid_BT, rules=EXACT, **options)


@struct.dataclass
class Batch:
    """Prompts of a task as a pytree; `of` makes it from arrays whose alignment was checked.

    Attributes:
      clean_BT, corrupt_BT, valid_BT: the arrays of `tasks.TaskArrays`.
      at_B2: positions at which logits are read: that of the continuation, and the next one.
      continuations: right and wrong ids.
      metric: name in `metrics.METRICS`.
      path_BK: positions at which continuations of several tokens are read; else None.
    """

    clean_BT: jax.Array
    corrupt_BT: jax.Array
    valid_BT: jax.Array
    at_B2: jax.Array
    continuations: Continuations
    metric: str = struct.field(pytree_node=False)
    path_BK: jax.Array | None = None

    @property
    def prompt_B(self) -> np.ndarray:
        """Number of each pair's clean prompt, from 0, by its token ids."""
        ids_BT = np.where(self.valid_BT, self.clean_BT, -1)
        number: dict[bytes, int] = {}
        return np.array([number.setdefault(ids_T.tobytes(), len(number)) for ids_T in ids_BT])

    @property
    def read_BQ(self) -> jax.Array:
        """Positions whose logits `metric_of` takes."""
        if self.path_BK is None:
            return self.at_B2
        return jnp.concatenate([self.at_B2, self.path_BK], 1)

    def metric_of(self, logits_BQV: jax.Array) -> jax.Array:
        """The metric of each prompt by the logits at `read_BQ`, `[B]`."""
        first_BV, second_BV, path_BKV = logits_BQV[:, 0], logits_BQV[:, 1], logits_BQV[:, 2:]
        return METRICS[self.metric](first_BV, second_BV, self.continuations, path_BKV)

    @classmethod
    def of(cls, task: Task) -> "Batch":
        """All prompts of a task."""
        arrays = task.arrays
        last = arrays.clean_BT.shape[1] - 1
        at_B2 = np.stack([arrays.position_B, np.minimum(arrays.position_B + 1, last)], 1)
        path, path_BK = arrays.continuations.path, None
        if path is not None:
            steps_K = np.arange(path.next_BK.shape[1])
            path_BK = jnp.asarray(np.minimum(arrays.position_B[:, None] + steps_K, last))
        return cls(
            *map(jnp.asarray, (arrays.clean_BT, arrays.corrupt_BT, arrays.valid_BT, at_B2)),
            continuations=jax.tree.map(jnp.asarray, arrays.continuations),
            metric=task.manifest.metric,
            path_BK=path_BK,
        )


@exact_jit
def metric(model: CircuitModel, batch: Batch, tokens_BT: jax.Array) -> jax.Array:
    """`measure` without edits, compiled once for all models and prompts of one shape."""
    return measure(model, batch, tokens_BT)[0]


def measure(
    model: CircuitModel,
    batch: Batch,
    tokens_BT: jax.Array,
    *,
    edits: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
    rules: GradientRules | None = None,
    first_layer: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """The metric of each prompt, `[B]` in float32, and what was recorded.

    Args:
      model: a dense or sparse model.
      batch: the continuations, and the positions at which to read logits.
      tokens_BT: `batch.clean_BT` or `batch.corrupt_BT`.
      edits: interventions by site (`lm_jax.model.edits`).
      record: reducers by site.
      rules: local derivatives of the metric, for a backward pass; None where none is taken.
      first_layer: number of the first layer to run, as `lm_jax.forward` takes it; None runs all.
    """
    output = model.forward(
        tokens_BT,
        batch.valid_BT,
        edits=edits,
        record=record,
        rules=rules,
        logits_at=batch.read_BQ,
        first_layer=first_layer,
    )
    return batch.metric_of(output.logits), output.records


def map_in_batches(
    program: Callable[[jax.Array], jax.Array], which_X: jax.Array, at_once: int
) -> jax.Array:
    """Values of all entries, `at_once` side by side, which bounds the memory.

    The last batch is filled up with the last entry: all batches are of one program, and are rounded
    alike. Each is one call, before which a request to stop is obeyed.

    Args:
      program: compiled function of a batch of entries; both have the entries on axis 0.
      which_X: entries, as an index or a mask each.
      at_once: entries of a batch.

    Raises:
      StoppedError: the command was asked to stop.
    """
    count = len(which_X)
    width = min(at_once, count)
    filler = jnp.repeat(which_X[-1:], -count % width, axis=0)
    batches = jnp.concatenate([which_X, filler]).reshape(-1, width, *which_X.shape[1:])
    return jnp.concatenate([call_stoppable(program, batch_W) for batch_W in batches])[:count]

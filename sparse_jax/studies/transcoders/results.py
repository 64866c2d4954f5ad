"""Typed results of a transcoder's training; JSON files are read back strictly."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

from lm_jax.run.results import Count, Share
from lm_jax.train.evaluate import Evaluation
from sparse_jax.graphs.graph import GraphScores
from sparse_jax.transcoders.inputs import Scales
from sparse_jax.transcoders.substitution import Agreement


@dataclasses.dataclass(frozen=True)
class StoredScales:
    """`scales.json`: `inputs.Scales` as lists, and the digest of the model that they are of."""

    model_sha256: str
    input_scale: tuple[float, ...]
    output_scale: tuple[float, ...]
    input_norm: tuple[float, ...]

    @classmethod
    def of(cls, scales: Scales, model_sha256: str) -> "StoredScales":
        """The scales as lists."""
        lists = (
            tuple(map(float, np.asarray(x)))
            for x in (scales.input_L, scales.output_L, scales.norm_L)
        )
        return cls(model_sha256, *lists)

    @property
    def scales(self) -> Scales:
        """The scales as arrays."""
        wide = self.input_scale, self.output_scale, self.input_norm
        return Scales(*(jnp.asarray(x, jnp.float32) for x in wide))


@dataclasses.dataclass(frozen=True)
class Reconstruction:
    """How well a transcoder reconstructs MLP outputs, and with how many features.

    Attributes:
      l0: active features per token, over all layers.
      l0_by_layer: the same, by layer of the features.
      unexplained: share of the variance over tokens that is not explained (FVU), of all layers
        together, each scaled to the same mean norm.
      unexplained_by_layer: the same, by layer.
    """

    l0: float
    l0_by_layer: tuple[float, ...]
    unexplained: float
    unexplained_by_layer: tuple[float, ...]

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Reconstruction":
        """The numbers from the sums of `Transcoding.evaluate`."""
        return cls.of_sums(evaluation.sums, evaluation.tokens)

    @classmethod
    def of_sums(cls, sums: Mapping[str, np.ndarray], tokens: int) -> "Reconstruction":
        """The numbers from such sums over a number of tokens."""
        mean_LD = sums["output_LD"] / tokens
        centred_L = sums["square_L"] - tokens * (mean_LD**2).sum(-1)
        active_L = sums["active_L"] / tokens
        return cls(
            float(active_L.sum()),
            tuple(map(float, active_L)),
            float(sums["error_L"].sum() / centred_L.sum()),
            tuple(map(float, sums["error_L"] / centred_L)),
        )

    def numbers(self) -> dict[str, float]:
        """The numbers of an evaluation, by name."""
        result = {"validation/l0": self.l0, "validation/unexplained": self.unexplained}
        for layer, (l0, left) in enumerate(
            zip(self.l0_by_layer, self.unexplained_by_layer, strict=True)
        ):
            result[f"validation/l0/layer_{layer}"] = l0
            result[f"validation/unexplained/layer_{layer}"] = left
        return result


@dataclasses.dataclass(frozen=True)
class Substitution:
    """Predictions of the model with all MLPs replaced (`substitution`), on held-out text.

    Attributes:
      tokens: number of tokens whose next-token distributions were compared.
      divergence: KL of the model's distribution from the replaced one's, in nats per token.
      agreement: share of tokens with the same most likely next token.
    """

    tokens: Count
    divergence: float
    agreement: Share

    @classmethod
    def of(cls, batches: Sequence[Agreement]) -> "Substitution":
        """The numbers from the sums over some batches."""
        tokens = sum(int(each.tokens) for each in batches)
        return cls(
            tokens,
            sum(float(each.divergence) for each in batches) / tokens,
            sum(int(each.agreeing) for each in batches) / tokens,
        )

    def numbers(self) -> dict[str, float]:
        """The numbers of an evaluation, by name."""
        return {"validation/kl": self.divergence, "validation/top1": self.agreement}


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Scores of attribution graphs on a fixed set of prompts.

    Attributes:
      prompts, tokens, sha256: number of prompts, their length, and the digest of their ids.
      without_features: prompts without an active feature, which have no graph and no score.
      max_features: features with a row in a graph.
      mean: mean over the graphs; None if there is none.
      replacement_by_prompt: replacement score of each graph, unpruned.
    """

    prompts: Count
    tokens: Count
    sha256: str
    without_features: Count
    max_features: Count
    mean: GraphScores | None
    replacement_by_prompt: tuple[Share, ...]

    def numbers(self) -> dict[str, float]:
        """The numbers of an evaluation, by name."""
        if self.mean is None:
            return {}
        parts = {"graph": self.mean.unpruned, "pruned_graph": self.mean.pruned}
        return {
            f"validation/{part}/{name}": value
            for part, scores in parts.items()
            for name, value in dataclasses.asdict(scores).items()
        }


@dataclasses.dataclass(frozen=True)
class Control:
    """What stands beside the transcoder: numbers on the same text and prompts.

    Attributes:
      name: "per_layer", a transcoder of as many parameters that writes into its own layer alone;
        "shuffled", the transcoder with decoders in random order; "neurons", the hidden units of the
        MLPs themselves, whose errors are zero by construction; "largest_neurons", of each token as
        many of them as the transcoder has active features (`neurons`).
      features: features per layer.
      parameters: parameters that stand for the MLPs.
      l0: active features per token, over all layers.
      unexplained: same as in `Reconstruction`.
      substitution: predictions with all MLPs replaced; None for neurons: all of them change
        nothing, and the largest are known only after the forward pass.
      graphs: scores; None for all neurons, whose whole graph has scores of 1 by construction.
      steps: updates of its own training, which `stop_l0` may end at others than the transcoder's;
        None for controls without training.
    """

    name: Literal["per_layer", "shuffled", "neurons", "largest_neurons"]
    features: Count
    parameters: Count
    l0: float
    unexplained: float
    substitution: Substitution | None
    graphs: PromptScores | None
    steps: Count | None = None


@dataclasses.dataclass(frozen=True)
class TranscoderSummary:
    """`summary.json` of a transcoder's training.

    Attributes:
      model, model_sha256, family: the model that it stands for.
      kind, window, features: settings of `TranscoderConfig`.
      parameters: number of parameters of the transcoder.
      steps: updates of training.
      tokens_seen: tokens seen in training, without padding and the first `skip_start` of each row.
        Outliers are counted, though training leaves them out.
      ended: why training ended: after all "steps", or at the "l0" of `stop_l0`.
      validation_tokens: tokens behind `reconstruction`.
      reconstruction: reconstruction by the exported transcoder, on held-out text.
      batch_topk: reconstruction by BatchTopK before its thresholds were set; None for other kinds.
      batch_topk_graphs: scores of graphs then, with all prompts as one batch.
      substitution, graphs: predictions and scores with the exported transcoder.
      controls: the same numbers of what it is compared with.
      dead: share of features that were silent for `penalties.silent_steps` updates at the end.
      device: kind of device that trained.
    """

    model: str
    model_sha256: str
    family: str
    kind: str
    window: int | None
    features: Count
    parameters: Count
    steps: Count
    tokens_seen: Count
    ended: Literal["steps", "l0"]
    validation_tokens: Count
    reconstruction: Reconstruction
    batch_topk: Reconstruction | None
    substitution: Substitution
    graphs: PromptScores
    controls: tuple[Control, ...]
    dead: Share
    device: str
    batch_topk_graphs: PromptScores | None = None

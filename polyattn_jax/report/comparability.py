"""Reasons why a number of an audit cannot be compared with the paper's.

The suite must be the same; the model agree in name (`paper.match`), shape, dtype and type of file;
lengths be within a tenth of the paper's; prompts be at least half as many. At b_auto the length of
the calibration must also be within a tenth. Only a known digest verifies that weights of the name
are the paper's (`is_verified`).
"""

from lm_jax.report.markup import number
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.report import findings, paper
from polyattn_jax.report.paper import PaperModel

LENGTH_BOUND, PROMPT_SHARE = 0.1, 0.5
DTYPE = "bfloat16"


def obstacles(
    length: tuple[int, int], prompts: tuple[int, int] | None = None, *, what: str = "prompts"
) -> list[str]:
    """Why a number of ours is not comparable with one of the paper's; empty if it is.

    Args:
      length: tokens of ours and of theirs, which may differ by a tenth of theirs.
      prompts: ours and theirs; ours may be half as many.
      what: noun for what has that length.
    """
    results = []
    ours, theirs = length
    if abs(ours - theirs) > LENGTH_BOUND * theirs:
        results.append(f"{what} of {number(ours)} tokens (paper: {number(theirs)})")
    if prompts is not None and prompts[0] < PROMPT_SHARE * prompts[1]:
        results.append(f"{number(prompts[0])} prompts (paper: {number(prompts[1])})")
    return results


def model_obstacles(summary: AuditSummary, model: PaperModel) -> list[str]:
    """The obstacles of weights of the paper's name but not its shape, dtype or type of file."""
    results = []
    # Of some models the paper does not print it.
    known = model.layers is not None
    if known and (summary.layers, summary.heads) != (model.layers, model.heads):
        results.append(
            f"{number(summary.layers)} layers of {number(summary.heads)} heads (paper: "
            f"{model.layers} of {model.heads})"
        )
    if any(name.endswith(".gguf") for name in summary.weights):
        results.append("a GGUF file, which may be quantised (paper: safetensors)")
    return results + dtype_obstacles(summary)


def dtype_obstacles(summary: AuditSummary) -> list[str]:
    """The obstacles of the dtype of weights and computation."""
    dtype = summary.config.dtype
    return [f"{dtype} (paper: {DTYPE})"] * (dtype != DTYPE)


def is_verified(summary: AuditSummary, model: PaperModel) -> bool:
    """Whether the weights are known to be those of the paper's model, and not by their name."""
    return summary.model_sha256 in model.digests


def calibration_obstacles(summary: AuditSummary) -> list[str]:
    """The obstacles of b_auto."""
    ours = summary.calibration.length
    return obstacles((ours, paper.SETTINGS.calibration_length), what="b_auto")


def needle_obstacles(summary: AuditSummary, model: PaperModel) -> list[str]:
    """The obstacles of the needle sweep."""
    ours = findings.softmax_of(summary.sweep).accuracy.n
    length = summary.config.sweep_length, paper.SETTINGS.needle_length
    return model_obstacles(summary, model) + obstacles(length, (ours, paper.SETTINGS.prompts))

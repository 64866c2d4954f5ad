"""The model card of a run, or of a model that was exported from it."""

from collections.abc import Sequence
from typing import Literal

from lm_jax.weights import card as cards
from protot_jax.training.config import PretrainConfig
from protot_jax.training.results import CheckpointPerplexity, PretrainSummary
from protot_jax.training.seeds import OverSeeds, over_seeds


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
        f"Trained from nothing by `iaj protot pretrain`: {holds}.",
        {
            "parameters": summary.parameters,
            "layers": config.num_layers,
            "width": config.hidden_size,
            "context": config.context,
            "text": cards.portable(config.corpus.source),
            "examples an epoch": summary.corpus.training_examples,
            "tokens seen": summary.seeds[0].tokens_seen,
            "seeds": ", ".join(str(seed) for seed in config.seeds),
            f"validation perplexity, {which} weights": validation(weights),
            f"test perplexity, {which} weights": test(weights),
            "unigram model": f"{summary.unigram_perplexity:.1f}",
        },
        f"Read it with `iaj protot generate --run=THIS_FOLDER{flag}` or "
        f"`protot_jax.load_run({argument})`. It knows the text it was trained on and no more; that "
        "text decides its licence.",
    )


def validation(checkpoints: Sequence[CheckpointPerplexity]) -> OverSeeds:
    """Validation perplexity of the weights of each seed, over seeds."""
    return over_seeds([each.validation_perplexity for each in checkpoints])


def test(checkpoints: Sequence[CheckpointPerplexity]) -> OverSeeds:
    """Test perplexity of the weights of each seed, over seeds."""
    return over_seeds([each.test_perplexity for each in checkpoints])

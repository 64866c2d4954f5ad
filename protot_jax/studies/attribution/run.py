"""Attributes the logits of one prompt; the work folder has no files of its own."""

from lm_jax.study import Opened, Work
from protot_jax.analysis.token_ids import prompt_tokens
from protot_jax.studies.attribution import numbers
from protot_jax.studies.attribution.decomposition import check_length
from protot_jax.studies.attribution.results import AttributionReport
from protot_jax.studies.attribution.settings import AttributionConfig


def inputs(config: AttributionConfig) -> Opened:
    """The model, which the prompt and the targets are compared with.

    Raises:
      UsageError: the model has no prototypes, or the prompt or a target cannot be used.
      BadInputError, CorruptError: the run cannot be read, or a word is not in the vocabulary.
    """
    model = config.load()
    _ = model.prototypes
    check_length(prompt_tokens(model.tokenizer, config.prompt), model.cfg)
    numbers.target_ids(model.tokenizer, config.targets)
    return Opened({"model": model.identity.text}, model)


def measure(config: AttributionConfig, work: Work) -> AttributionReport:
    """Attributes the logits of the prompt, and measures the effects of prototypes on them."""
    model = work.loaded
    work.record(tokenizer=model.tokenizer.sha256, seeds={"run": model.seed})
    return numbers.summarise(
        model, config.prompt, config.targets, top=config.top, pairs=config.pairs
    )

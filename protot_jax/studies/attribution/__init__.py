"""Attributes the next word's logit to prototypes, layer by layer and pair by pair of tokens.

    iaj protot graph --run=runs/speeches --prompt="the people of the united"
    iaj protot graph --run=runs/speeches --prompt="the war with" --targets=mexico,spain

With gates, divisors of norms and MLP outputs held, a logit is an exact sum over what each prototype
of each layer carries from one token to another (`decomposition.py`). Next to it stands the effect
of every prototype on the logit in the model itself, with nothing held. A target is a word of one
token; without `--targets` they are the most probable next tokens. `--workdir` is by default a
folder below `attribution` of the run; the page has maps of layers by prototypes, the strongest
pairs, and certificates. In Python,

    model = protot_jax.load_run("runs/speeches")
    tokens = attribution.prompt_tokens(model.tokenizer, "the people of the united")
    result = attribution.attribute(model, tokens, targets=[412])
    result.through_XLNTS[0, 2, 5]      # of prototype 5 in layer 2, query by key position
"""

from lm_jax.study import Study
from protot_jax.analysis.token_ids import prompt_tokens
from protot_jax.studies.attribution.decomposition import Decomposition, attribute
from protot_jax.studies.attribution.results import AttributionReport
from protot_jax.studies.attribution.settings import AttributionConfig, smoke

__all__ = ["STUDY", "Decomposition", "attribute", "prompt_tokens"]

STUDY = Study(
    command="protot graph",
    config=AttributionConfig,
    modes={"smoke": smoke},
    summary=AttributionReport,
)

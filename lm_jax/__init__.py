"""The decoder that the three libraries share: layers, sites and edits, weights, decoding."""

from lm_jax.inspect.interventions import ablate, patch, steer
from lm_jax.inspect.run import Run, final_norm, logit_lens
from lm_jax.model import params
from lm_jax.model.attention import Attend, PerLayer, fused, register_fused, softmax
from lm_jax.model.config import BlockEnd, DecoderConfig, LayerShape
from lm_jax.model.decode import Sampling, generate
from lm_jax.model.decoder import (
    Cache,
    Output,
    count_params,
    forward,
    init_cache,
    init_params,
    param_spec,
)
from lm_jax.model.edits import Add, Chain, Freeze, OneHead, OneLayer, Replace, Scale, ScaleGradient
from lm_jax.model.layers import unembed
from lm_jax.model.params import ParamSpec
from lm_jax.model.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from lm_jax.model.sites import SITES, StatefulEdit, keep
from lm_jax.run.moved import keep_names
from lm_jax.weights.load import Pretrained, load_pretrained
from lm_jax.weights.save import save_pretrained

keep_names(
    "lm_jax",
    {},
    {
        f"{room}.{name}": f"{place}.{name}"
        for room, place, names in (
            ("run", "console", "cli flags usage output terminal config_files compilation"),
            (
                *("weights", "weights.families"),
                "fields table gemma gemma4 gpt2 gpt_neox llama mistral olmo olmo2 phi3 qwen "
                "stablelm",
            ),
        )
        for name in names.split()
    },
)

__all__ = [
    "SITES",
    "Add",
    "Attend",
    "BlockEnd",
    "Cache",
    "Chain",
    "DecoderConfig",
    "DynamicScaling",
    "Freeze",
    "LayerShape",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "OneHead",
    "OneLayer",
    "Output",
    "ParamSpec",
    "PerLayer",
    "Pretrained",
    "ProportionalScaling",
    "Replace",
    "Rope",
    "Run",
    "Sampling",
    "Scale",
    "ScaleGradient",
    "StatefulEdit",
    "YarnScaling",
    "ablate",
    "count_params",
    "final_norm",
    "forward",
    "fused",
    "generate",
    "init_cache",
    "init_params",
    "keep",
    "load_pretrained",
    "logit_lens",
    "param_spec",
    "params",
    "patch",
    "register_fused",
    "save_pretrained",
    "softmax",
    "steer",
    "unembed",
]

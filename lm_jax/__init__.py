"""The decoder that the three libraries share: layers, sites and edits, weights, decoding."""

import importlib
from typing import TYPE_CHECKING, Any

from lm_jax.run.moved import keep_names

if TYPE_CHECKING:
    from lm_jax.inspect.interventions import ablate, patch, steer
    from lm_jax.inspect.run import Run, final_norm, logit_lens
    from lm_jax.model import params
    from lm_jax.model.attention import Attend, PerLayer, fused, register_fused, softmax
    from lm_jax.model.config import BlockEnd, DecoderConfig, LayerShape
    from lm_jax.model.decode import generate
    from lm_jax.model.decoder import (
        Cache,
        Output,
        count_params,
        forward,
        init_cache,
        init_params,
        param_spec,
    )
    from lm_jax.model.edits import (
        Add,
        Chain,
        Freeze,
        OneHead,
        OneLayer,
        Replace,
        Scale,
        ScaleGradient,
    )
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
    from lm_jax.model.sampling import Sampling
    from lm_jax.model.sites import SITES, StatefulEdit, keep
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

# The public names are imported when they are first used: errors, assets and work folders, which a
# command looks at first, then do not wait for JAX.
_NAMES = {
    "inspect.interventions": "ablate patch steer",
    "inspect.run": "Run final_norm logit_lens",
    "model.attention": "Attend PerLayer fused register_fused softmax",
    "model.config": "BlockEnd DecoderConfig LayerShape",
    "model.decode": "generate",
    "model.sampling": "Sampling",
    "model.decoder": "Cache Output count_params forward init_cache init_params param_spec",
    "model.edits": "Add Chain Freeze OneHead OneLayer Replace Scale ScaleGradient",
    "model.layers": "unembed",
    "model.params": "ParamSpec",
    "model.rope": "DynamicScaling LinearScaling Llama3Scaling LongRopeScaling ProportionalScaling "
    "Rope YarnScaling",
    "model.sites": "SITES StatefulEdit keep",
    "weights.load": "Pretrained load_pretrained",
    "weights.save": "save_pretrained",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = [
    "assets",
    "checkpoint",
    "errors",
    "inspect",
    "model",
    "parallel",
    "run",
    "statistics",
    "text",
    "weights",
]
_MODULES = {"params": "model.params"} | {name: name for name in _ROOMS}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"lm_jax.{_MODULES[name]}")
    if name not in _PLACES:
        raise AttributeError(f"module 'lm_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lm_jax.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

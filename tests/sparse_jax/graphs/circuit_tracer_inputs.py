"""Small models and dictionaries from seeds, those of the graphs in circuit_tracer/.

The order of draws decides what is drawn: it must stay.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, TOKENS, FEATURES, K = 256, 12, 96, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One dictionary of one model; `number` is part of its seed."""

    number: int
    family: str
    kind: str
    reads: str = "mlp.hook_in"
    writes: str = "hook_mlp_out"
    window: int | None = None
    with_skip: bool = False
    active: float = 1.4


CASES = {
    "gpt2_plt": Case(3, "gpt2", "relu", writes="mlp.hook_out", window=1),
    "llama_clt": Case(4, "llama", "jumprelu"),
    "llama_resid_mid": Case(6, "llama", "jumprelu", reads="hook_resid_mid", active=2.5),
    "llama_skip": Case(7, "llama", "relu", window=1, with_skip=True),
    "llama_topk": Case(8, "llama", "topk", window=1, with_skip=True),
}


class Draws:
    """Normal numbers in float32, one array after another."""

    def __init__(self, seed: int | list[int]) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float) -> np.ndarray:
        return (self._rng.standard_normal(shape) * scale).astype(np.float32)


def write(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes the model and the dictionary of a case, and returns their folders."""
    case, model, dictionary = CASES[name], folder / "model", folder / "dictionary"
    model.mkdir(parents=True)
    dictionary.mkdir()
    config, tensors = FAMILIES[case.family]()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    layers, width = LAYERS[case.family], 32
    draw = Draws([7, case.number])
    if case.window is None:
        _cross_layer(draw, dictionary, layers, width, case)
    else:
        _per_layer(draw, dictionary, layers, width, case)
    kind = "cross_layer_transcoder" if case.window is None else "transcoder_set"
    lines = [f"model_kind: {kind}", "model_name: tiny", f"feature_input_hook: {case.reads}"]
    lines += [f"feature_output_hook: {case.writes}", "scan: tiny"]
    lines += ["activation: topk", f"k: {K}"] if case.kind == "topk" else []
    (dictionary / "config.yaml").write_text("\n".join(lines) + "\n")
    return model, dictionary


def _cross_layer(draw: Draws, folder: Path, layers: int, width: int, case: Case) -> None:
    for layer in range(layers):
        encoder = {
            f"W_enc_{layer}": draw(FEATURES, width, scale=width**-0.5),
            f"b_enc_{layer}": draw(FEATURES, scale=0.2),
            f"b_dec_{layer}": draw(width, scale=0.2),
        }
        threshold = np.abs(np.float32(case.active) + draw(FEATURES, scale=0.1))
        encoder[f"threshold_{layer}"] = threshold
        save_file(encoder, folder / f"W_enc_{layer}.safetensors")
        decoder = draw(FEATURES, layers - layer, width, scale=0.5 * width**-0.5)
        save_file({f"W_dec_{layer}": decoder}, folder / f"W_dec_{layer}.safetensors")


def _per_layer(draw: Draws, folder: Path, layers: int, width: int, case: Case) -> None:
    shift = np.float32(case.active if case.kind == "relu" else 0)
    for layer in range(layers):
        tensors = {
            "W_enc": draw(FEATURES, width, scale=width**-0.5),
            "W_dec": draw(FEATURES, width, scale=0.5 * width**-0.5),
            "b_enc": draw(FEATURES, scale=0.2) - shift,
            "b_dec": draw(width, scale=0.2),
        }
        if case.with_skip:
            tensors["W_skip"] = draw(width, width, scale=0.3 * width**-0.5)
        save_file(tensors, folder / f"layer_{layer}.safetensors")


def _llama() -> tuple[dict, dict[str, np.ndarray]]:
    draw, width, heads, keys, units = Draws(1), 32, 4, 2, 64
    head = width // heads
    tensors = {
        "model.embed_tokens.weight": draw(VOCABULARY, width, scale=1.0),
        "lm_head.weight": draw(VOCABULARY, width, scale=1.5 * width**-0.5),
        "model.norm.weight": 1 + draw(width, scale=0.2),
    }
    for layer in range(LAYERS["llama"]):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": 1 + draw(width, scale=0.2),
            at + "post_attention_layernorm.weight": 1 + draw(width, scale=0.2),
            at + "self_attn.q_proj.weight": draw(heads * head, width, scale=1.5 * width**-0.5),
            at + "self_attn.k_proj.weight": draw(keys * head, width, scale=1.5 * width**-0.5),
            at + "self_attn.v_proj.weight": draw(keys * head, width, scale=width**-0.5),
            at + "self_attn.o_proj.weight": draw(width, heads * head, scale=width**-0.5),
            at + "mlp.gate_proj.weight": draw(units, width, scale=width**-0.5),
            at + "mlp.up_proj.weight": draw(units, width, scale=width**-0.5),
            at + "mlp.down_proj.weight": draw(width, units, scale=units**-0.5),
        }
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS["llama"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "hidden_size": width,
        "intermediate_size": units,
        "head_dim": head,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    return config, tensors


def _gpt2() -> tuple[dict, dict[str, np.ndarray]]:
    draw, width, units, context = Draws(2), 32, 128, 64
    tensors = {
        "transformer.wte.weight": draw(VOCABULARY, width, scale=0.5),
        "transformer.wpe.weight": draw(context, width, scale=0.3),
        "transformer.ln_f.weight": 1 + draw(width, scale=0.2),
        "transformer.ln_f.bias": draw(width, scale=0.2),
    }
    for layer in range(LAYERS["gpt2"]):
        at = f"transformer.h.{layer}."
        for name in ("ln_1", "ln_2"):
            tensors[f"{at}{name}.weight"] = 1 + draw(width, scale=0.2)
            tensors[f"{at}{name}.bias"] = draw(width, scale=0.2)
        tensors |= {
            at + "attn.c_attn.weight": draw(width, 3 * width, scale=1.2 * width**-0.5),
            at + "attn.c_attn.bias": draw(3 * width, scale=0.2),
            at + "attn.c_proj.weight": draw(width, width, scale=width**-0.5),
            at + "attn.c_proj.bias": draw(width, scale=0.2),
            at + "mlp.c_fc.weight": draw(width, units, scale=width**-0.5),
            at + "mlp.c_fc.bias": draw(units, scale=0.2),
            at + "mlp.c_proj.weight": draw(units, width, scale=units**-0.5),
            at + "mlp.c_proj.bias": draw(width, scale=0.2),
        }
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": LAYERS["gpt2"],
        "n_head": 4,
        "n_embd": width,
        "n_positions": context,
        "n_inner": units,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return config, tensors


LAYERS = {"llama": 4, "gpt2": 3}
FAMILIES = {"llama": _llama, "gpt2": _gpt2}

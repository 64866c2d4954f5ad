"""Regenerates `tests/golden/`: reference models with their outputs computed by torch.

    python -m tools.make_goldens            the tiny random models
    python -m tools.make_goldens qwen3      some of them
    python -m tools.make_goldens smollm2    logits of a pretrained model that is already fetched

Each tiny case is a folder as `transformers` saves it, and `expected.safetensors` with token ids,
the residual stream after every layer, and logits, in float32. For a pretrained model only the
largest logits at some positions of one text are stored, in `<name>_real.json`. This needs torch;
the tests that read the files do not. The parity tests that run torch use the same cases.
"""

from collections.abc import Mapping
from pathlib import Path
import shutil
import sys
import tempfile
from typing import Any

import numpy as np

from lm_jax.run.files import write_json

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
TEXT = (
    "The history of the city begins in the early Middle Ages, when a small settlement of fishermen "
    "grew up around the ford of the river. In 1172 the bishop granted it a market, and the "
    "merchants who came there from the south built the first stone houses along the street that "
    "still bears their name. The walls followed a hundred years later."
)
POSITIONS = (0, 1, 5, 20, 50, -1)
TOKENS_BT = np.random.default_rng(0).integers(0, 48, (2, 11))

_SIZE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _rope(theta: float, **settings: Any) -> dict[str, Any]:
    return {"rope_theta": theta, **settings}


def _small(family: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """A family, and its settings for a tiny model."""
    return family, {**_SIZE, **settings}


_LLAMA3 = _rope(
    500.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_PARTIAL = _rope(100.0, partial_rotary_factor=0.34)
_TWO_THIRDS = _rope(100.0, partial_rotary_factor=0.67)
_GPT2 = {"vocab_size": 48, "n_positions": 32, "n_embd": 24}

CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama_gqa": _small("Llama", num_key_value_heads=2, head_dim=6, rope_parameters=_LLAMA3),
    "llama_mha_tied_bias": _small(
        "Llama",
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_rope(100.0, rope_type="linear", factor=2.0),
    ),
    "llama_mqa": _small("Llama", num_key_value_heads=1, head_dim=6),
    "gpt2": ("GPT2", {**_GPT2, "n_layer": 3, "n_head": 4}),
    "gpt2_untied": (
        "GPT2",
        {
            **_GPT2,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 20,
            "tie_word_embeddings": False,
            "activation_function": "relu",
        },
    ),
    "neox": _small("GPTNeoX", rope_parameters=_PARTIAL),
    "neox_sequential_tied": _small(
        "GPTNeoX",
        use_parallel_residual=False,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters=_rope(100.0, partial_rotary_factor=1.0),
    ),
    "phi3": _small(
        "Phi3",
        num_key_value_heads=2,
        sliding_window=4,
        pad_token_id=None,
        rope_parameters=_TWO_THIRDS,
    ),
    "phi3_longrope": _small(
        "Phi3",
        num_hidden_layers=2,
        num_key_value_heads=2,
        pad_token_id=None,
        # Shorter than `TOKENS_BT`, so that the long factors count.
        original_max_position_embeddings=8,
        rope_parameters={
            **_TWO_THIRDS,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [1.25, 3.0],
        },
    ),
    "llama_dynamic": _small(
        "Llama",
        num_hidden_layers=2,
        num_key_value_heads=2,
        # Shorter than `TOKENS_BT`, so that the base grows.
        max_position_embeddings=8,
        rope_parameters=_rope(100.0, rope_type="dynamic", factor=3.0),
    ),
    "stablelm": _small(
        "StableLm", num_key_value_heads=2, use_qkv_bias=True, rope_parameters=_PARTIAL
    ),
    "stablelm_parallel_qk_norm": _small(
        "StableLm",
        num_key_value_heads=2,
        qk_layernorm=True,
        use_parallel_residual=True,
        tie_word_embeddings=True,
        rope_parameters=_TWO_THIRDS,
    ),
    "olmo2": _small("Olmo2", num_key_value_heads=2, rope_parameters=_rope(100.0)),
    "olmo": _small("Olmo", num_key_value_heads=2, rope_parameters=_rope(100.0)),
    "llama_yarn": _small(
        "Llama",
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=12,
        rope_parameters=_rope(
            100.0,
            rope_type="yarn",
            factor=2.0,
            beta_fast=2.0,
            original_max_position_embeddings=16,
        ),
    ),
    "mistral": _small(
        "Mistral",
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        rope_parameters=_rope(100.0),
    ),
    "qwen2": _small("Qwen2", num_key_value_heads=2),
    "qwen2_windows": _small(
        "Qwen2",
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_parameters=_rope(100.0),
    ),
    "qwen3": _small(
        "Qwen3",
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=[_FULL, _SLIDING, _FULL],
        rope_parameters=_rope(100.0),
    ),
    "gemma2": _small(
        "Gemma2",
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=2,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=1.5,
        rope_parameters=_rope(100.0),
    ),
    "gemma3": _small(
        "Gemma3",
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        layer_types=[_SLIDING, _FULL, _SLIDING],
        query_pre_attn_scalar=16,
        rope_parameters={
            _FULL: _rope(1000.0, rope_type="linear", factor=8.0),
            _SLIDING: _rope(50.0, rope_type="default"),
        },
    ),
    "gemma3_gqa_logit_softcap": _small(
        "Gemma3",
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=3,
        num_hidden_layers=2,
        layer_types=[_SLIDING, _FULL],
        final_logit_softcapping=1.5,
    ),
    "gemma4": _small(
        "Gemma4",
        intermediate_size=20,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        sliding_window=4,
        # Layers 3 to 5 read the keys and values of layers 1 and 2.
        layer_types=[_SLIDING, _SLIDING, _FULL] * 2,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=48,
        final_logit_softcapping=1.5,
        rope_parameters={
            _FULL: _rope(1000.0, rope_type="proportional", partial_rotary_factor=0.25),
            _SLIDING: _rope(50.0, rope_type="default"),
        },
    ),
    "gemma4_tied_kv": _small(
        "Gemma4",
        intermediate_size=20,
        num_key_value_heads=2,
        head_dim=6,
        global_head_dim=12,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        attention_bias=True,
        sliding_window=3,
        layer_types=[_SLIDING, _SLIDING, _FULL],
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
    ),
}

# The families whose classes are not called after them alone.
_CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
}


def classes(family: str) -> tuple[str, str]:
    """The names of a family's config and model in `transformers`."""
    return _CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))


def reference(case: str) -> Any:
    """The torch model of a case, with random weights, norms and biases."""
    import torch

    from lm_jax.weights.compat import transformers

    family, settings = CASES[case]
    config_class, model_class = (getattr(transformers(), name) for name in classes(family))
    torch.manual_seed(0)
    model = model_class(config_class(**settings, attn_implementation="eager")).eval()
    # Gemma 4 keeps the scalar of each layer as a buffer.
    scalars = [b for name, b in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for parameter in [*model.parameters(), *scalars]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hidden_and_logits(model: Any, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The residual stream after every layer `[L, B, T, D]` and logits `[B, T, V]`, from torch.

    They come from hooks on the layers, because `output_hidden_states` ends after the final norm.
    """
    import torch

    base = model.base_model
    blocks = base.h if hasattr(base, "h") else base.layers
    streams: list[np.ndarray] = []

    def record(_module: Any, _args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        streams.append(stream.float().numpy())

    hooks = [block.register_forward_hook(record) for block in blocks]
    with torch.no_grad():
        logits = model(torch.tensor(tokens_BT)).logits.float().numpy()
    for hook in hooks:
        hook.remove()
    return np.stack(streams), logits


def real_reference(model: Any) -> Any:
    """The torch model of a `load_pretrained` result, by way of a folder that we save."""
    import lm_jax
    from lm_jax.weights.compat import transformers

    with tempfile.TemporaryDirectory() as folder:
        lm_jax.save_pretrained(Path(folder) / "model", model.cfg, model.params)
        return (
            transformers()
            .AutoModelForCausalLM.from_pretrained(
                Path(folder) / "model", attn_implementation="eager", dtype="float32"
            )
            .eval()
        )


def write_real(name: str) -> None:
    """Writes the five largest logits at each of `POSITIONS` in `TEXT`."""
    import lm_jax

    model: Any = lm_jax.load_pretrained(name)
    ids = model.tokenizer.encode(TEXT)
    _, logits = hidden_and_logits(real_reference(model), np.array([ids]))
    rows = []
    for position in POSITIONS:
        top = np.argsort(-logits[0, position])[:5]
        values = [round(float(x), 5) for x in logits[0, position, top]]
        rows.append({"position": position, "top_ids": top.tolist(), "logits": values})
    expected = {"weights_sha256": model.sha256, "text": TEXT, "ids": ids, "rows": rows}
    write_json(GOLDEN / f"{name}_real.json", expected)


def write_case(case: str) -> None:
    """Writes the folder of a tiny case and what torch computes."""
    from safetensors.numpy import save_file

    folder = GOLDEN / case
    shutil.rmtree(folder, ignore_errors=True)
    model = reference(case)
    model.save_pretrained(folder)
    hidden, logits = hidden_and_logits(model, TOKENS_BT)
    save_file(
        {"tokens": TOKENS_BT, "hidden": hidden, "logits": np.ascontiguousarray(logits)},
        folder / "expected.safetensors",
    )
    print(f"{case}: {sum(f.stat().st_size for f in folder.iterdir()) / 1024:.0f} KiB")


def main() -> None:
    """Writes the named cases and pretrained models, or every tiny case."""
    for name in sys.argv[1:] or CASES:
        if name in CASES:
            write_case(name)
        else:
            write_real(name)


if __name__ == "__main__":
    main()

"""Row maps in place of softmax in `transformers`: an attention function on whole score rows.

The usual alternative to `polyattn_jax.audit.measure.evaluate`. torch and transformers are only
imported where they run.
"""

from typing import Any

from polyattn_jax.recipes.row_maps import SOFTMAX, Map

NAME = "row_map"


class RecipeModel:
    """A causal model of `transformers` whose heads all use one row map, chosen at each call."""

    def __init__(self, model: Any) -> None:
        import torch

        from lm_jax.weights.compat import transformers

        library = transformers()
        self._torch = torch
        self._map: tuple[Map, float] = SOFTMAX.map, 0.0

        def attend(module, query, key, value, attention_mask, scaling=None, **options):
            B, N, T, H = query.shape
            K = key.shape[1]
            scores = query.reshape(B, K, N // K * T, H) @ key.transpose(-1, -2) * scaling
            seen = torch.ones(T, T, dtype=torch.bool).tril()
            weights = self._weights(scores.reshape(B, N, T, T), seen)
            z = weights.reshape(B, K, N // K * T, T) @ value
            return z.reshape(B, N, T, H).transpose(1, 2).contiguous(), None

        library.AttentionInterface.register(NAME, attend)
        masks = library.AttentionMaskInterface
        masks.register(NAME, masks()["sdpa"])
        self._model = model.eval()
        self._model.set_attn_implementation(NAME)

    def __call__(self, tokens_BT: Any, row_map: Map, bias: float) -> Any:
        """The last logits `[B, V]` of prompts without padding."""
        self._map = row_map, bias
        with self._torch.inference_mode():
            return self._model(tokens_BT, use_cache=False, logits_to_keep=1).logits[:, -1]

    def _weights(self, scores: Any, seen: Any) -> Any:
        torch = self._torch
        row_map, bias = self._map
        match row_map.kind:
            case "softmax":
                return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            case "sigmoid":
                log_weight = torch.nn.functional.logsigmoid(scores + bias)
                return torch.softmax(log_weight.masked_fill(~seen, -torch.inf), -1)
            case "relu_power":
                r = torch.relu(scores + bias).masked_fill(~seen, 0.0)
                weight = (r / r.amax(-1, keepdim=True).clamp_min(1e-30)) ** row_map.p
                return weight / weight.sum(-1, keepdim=True).clamp_min(1e-30)
            case "relu_over_length":
                weight = torch.relu(scores + bias).masked_fill(~seen, 0.0) ** row_map.p
                return weight / seen.sum(-1, keepdim=True) ** row_map.alpha
            case _:
                raise ValueError(f"no row map of kind {row_map.kind!r} here")

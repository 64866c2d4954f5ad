"""S_p from `transformers` in torch: a hook records the last row of scores of every layer.

The usual alternative to `polyattn_jax.audit.measure.diagnose`: an attention function that records
one row of scores and then calls torch's fused attention, and S_p of the recorded rows. torch and
transformers are only imported where they run.
"""

from collections.abc import Sequence
from typing import Any

NAME = "keeps_last_row"


class ScoreRows:
    """A model of `transformers` that returns S_p of the last query of a prompt.

    Attributes:
      degrees, biases: degrees p and biases of the row maps.
    """

    def __init__(self, model: Any, degrees: Sequence[int], biases: Sequence[float]) -> None:
        import torch

        from lm_jax.weights.compat import transformers

        library = transformers()
        fused = library.AttentionInterface()["sdpa"]
        self.degrees, self.biases = degrees, biases
        self._rows: list[Any] = []

        def attend(module, query, key, value, attention_mask, scaling=None, **options):
            B, N, _, H = query.shape
            last = query[:, :, -1].reshape(B, key.shape[1], -1, H)
            self._rows.append((last @ key.transpose(-1, -2) * scaling).reshape(B, N, -1))
            return fused(module, query, key, value, attention_mask, scaling=scaling, **options)

        library.AttentionInterface.register(NAME, attend)
        masks = library.AttentionMaskInterface
        masks.register(NAME, masks()["sdpa"])
        self._model = model.eval()
        self._model.set_attn_implementation(NAME)
        self._torch = torch

    def __call__(self, tokens_BT: Any) -> tuple[Any, Any]:
        """S_p `[L, bias, B, N, degree]` against the largest score, and the last logits `[B, V]`.

        S_p of a row without a positive score is NaN.
        """
        torch = self._torch
        with torch.inference_mode():
            self._rows.clear()
            logits = self._model(tokens_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
            rows_LBNS = torch.stack(self._rows)
            of_bias = []
            for bias in self.biases:
                r = torch.relu(rows_LBNS + bias)
                ratios = r / r.amax(-1, keepdim=True)
                of_bias.append(torch.stack([(ratios**p).sum(-1) - 1 for p in self.degrees], -1))
            return torch.stack(of_bias, 1), logits

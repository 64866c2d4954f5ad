"""A training step of transformers' Llama in torch, on our weights.

The usual alternative to ours: `LlamaForCausalLM` with torch's fused attention and torch's fused
AdamW (betas 0.9 and 0.999, decay 0.1 on matrices), eager or under `torch.compile`, float32, no
dropout. torch is only imported where it runs.
"""

import dataclasses
import importlib.util
from pathlib import Path
import tempfile
from typing import Any

import jax
import numpy as np

import lm_jax
from lm_jax.model.config import DecoderConfig
from lm_jax.train.config import TrainConfig

INSTALL = "pip install torch==2.13.0 (Linux without a GPU: from PyTorch's index of CPU builds)"


def missing() -> str:
    """What to install before torch can run, or ""."""
    return "" if importlib.util.find_spec("torch") else f"torch is not installed; {INSTALL}"


class TorchStep:
    """A step that continues from its own result.

    Attributes:
      loss: nats per token of the untrained model on the batch.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        params: Any,
        tokens_BS: np.ndarray,
        settings: TrainConfig,
        *,
        compiled: bool,
    ) -> None:
        import torch

        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        model = as_torch(cfg, params).train().to(device)
        tokens = torch.tensor(tokens_BS, dtype=torch.long, device=device)

        def loss_of(read, wanted):
            logits = model(read, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

        self._loss = torch.compile(loss_of) if compiled else loss_of
        self._batch = tokens[:, :-1], tokens[:, 1:]
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        with torch.no_grad():
            self.loss = float(loss_of(*self._batch))

    def __call__(self) -> float:
        """Makes one update, waits for it, and returns the loss before it."""
        self._optimizer.zero_grad()
        loss = self._loss(*self._batch)
        loss.backward()
        self._optimizer.step()
        return loss.item()


def as_torch(cfg: DecoderConfig, params: Any) -> Any:
    """The model of `transformers` with these weights, in float32."""
    import torch

    from lm_jax.weights.compat import transformers

    transformers().utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        # A row of the embedding at zero is no matter of speed, and `transformers` keeps none.
        lm_jax.save_pretrained(path, dataclasses.replace(cfg, pad_id=None), params)
        return transformers().AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        )

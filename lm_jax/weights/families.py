"""The families of pretrained decoders, each a table of tensors read both ways."""

from collections.abc import Mapping

from lm_jax.weights import table
from lm_jax.weights.gemma import GEMMA2, GEMMA3
from lm_jax.weights.gemma4 import GEMMA4, GEMMA4_MULTIMODAL
from lm_jax.weights.gpt2 import GPT2
from lm_jax.weights.gpt_neox import GPT_NEOX
from lm_jax.weights.llama import LLAMA
from lm_jax.weights.mistral import MISTRAL
from lm_jax.weights.olmo import OLMO
from lm_jax.weights.olmo2 import OLMO2
from lm_jax.weights.phi3 import PHI3
from lm_jax.weights.qwen import QWEN2, QWEN3
from lm_jax.weights.stablelm import STABLELM

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, STABLELM),
    *(GPT2, GPT_NEOX, GEMMA2, GEMMA3, GEMMA4, GEMMA4_MULTIMODAL, OLMO, OLMO2),
)
FAMILIES: Mapping[str, table.Family] = {family.name: family for family in _ALL}

"""The families of pretrained decoders, each a table of tensors read both ways."""

from collections.abc import Mapping

from lm_jax.weights.families import table
from lm_jax.weights.families.gemma import GEMMA2, GEMMA3
from lm_jax.weights.families.gemma4 import GEMMA4, GEMMA4_MULTIMODAL
from lm_jax.weights.families.gpt2 import GPT2
from lm_jax.weights.families.gpt_neox import GPT_NEOX
from lm_jax.weights.families.llama import LLAMA
from lm_jax.weights.families.mistral import MISTRAL
from lm_jax.weights.families.olmo import OLMO
from lm_jax.weights.families.olmo2 import OLMO2
from lm_jax.weights.families.phi3 import PHI3
from lm_jax.weights.families.qwen import QWEN2, QWEN3
from lm_jax.weights.families.stablelm import STABLELM

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, STABLELM),
    *(GPT2, GPT_NEOX, GEMMA2, GEMMA3, GEMMA4, GEMMA4_MULTIMODAL, OLMO, OLMO2),
)
FAMILIES: Mapping[str, table.Family] = {family.name: family for family in _ALL}

"""Sentences on arguments of another type than the model takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from lm_jax.errors import UsageError


def check_tokens(tokens_BT: Any) -> None:
    """Refuses what are no token ids `[B, T]`.

    Raises:
      UsageError: it is text, a list, an array of another number of axes, or not of whole numbers.
    """
    if _is_text(tokens_BT):
        raise UsageError("tokens_BT is text; encode it by the tokenizer, or call model.run(text)")
    if not hasattr(tokens_BT, "shape") or not hasattr(tokens_BT, "dtype"):
        raise UsageError(
            f"tokens_BT is a {type(tokens_BT).__name__}; give an array of token ids, such as "
            "jnp.array([[3, 1, 4]])"
        )
    if len(tokens_BT.shape) != 2:
        hint = ", as tokens[None] for one text" if len(tokens_BT.shape) == 1 else ""
        raise UsageError(f"tokens_BT has the shape {tokens_BT.shape}; give [B, T]{hint}")
    if not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise UsageError(f"tokens_BT is of {tokens_BT.dtype}; token ids are whole numbers")


def check_prompts(prompts: Any) -> None:
    """Refuses what are no lists of token ids, one for each prompt.

    Raises:
      UsageError: it is text, or the ids of one prompt alone.
    """
    if _is_text(prompts):
        raise UsageError("prompts is text; encode it by the tokenizer")
    if not hasattr(prompts, "__len__") or any(not hasattr(each, "__len__") for each in prompts):
        raise UsageError(
            "prompts holds no lists of token ids; give one for each prompt, as [ids] for one"
        )


def check_mapping(name: str, given: Any, values: str) -> None:
    """Refuses what does not map sites to values.

    Args:
      name: name of the argument.
      given: the argument; None is none.
      values: what it maps sites to, with an example.

    Raises:
      UsageError: it is no mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"{name} is a {type(given).__name__}; give a mapping of sites to {values}")


def _is_text(given: Any) -> bool:
    if isinstance(given, str):
        return True
    return isinstance(given, Sequence) and any(isinstance(each, str) for each in given)

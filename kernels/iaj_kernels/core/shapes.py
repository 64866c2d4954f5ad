"""Checks the shapes of an operation's arguments against the letters of their names.

The letters are those of the design's dimension key: `q_BTNH` has axes B, T, N and H, and a letter
has one size throughout a call.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


def sizes(op: str, **arrays: Any) -> dict[str, int]:
    """The size of every letter; an argument is passed as `name_LETTERS=array`, None is skipped.

    Raises:
      ValueError: an array's rank is not its number of letters, or a letter has two sizes.
    """
    results: dict[str, tuple[int, str]] = {}
    for argument, array in arrays.items():
        if array is None:
            continue
        name, _, letters = argument.rpartition("_")
        shape = jnp.shape(array)
        if len(shape) != len(letters):
            raise ValueError(f"{op}: {name} has shape {shape}; expected [{', '.join(letters)}]")
        for letter, size in zip(letters, shape, strict=True):
            first = results.setdefault(letter, (size, name))
            if first[0] != size:
                raise ValueError(
                    f"{op}: {name} has {letter} = {size} (shape {shape}, [{', '.join(letters)}]) "
                    f"but {first[1]} has {letter} = {first[0]}"
                )
    return {letter: size for letter, (size, _) in results.items()}


def floating(
    op: str, choices: tuple[Any, ...] = (jnp.float32, jnp.bfloat16), **arrays: Any
) -> None:
    """Checks that every array has one of the dtypes `choices`.

    Raises:
      TypeError: naming the argument, its dtype and the allowed dtypes.
    """
    allowed = [jnp.dtype(choice) for choice in choices]
    for name, array in arrays.items():
        if array is not None and array.dtype not in allowed:
            text = " or ".join(str(each) for each in allowed)
            raise TypeError(f"{op}: {name} is {array.dtype}; cast it to {text}")


def one_dtype(op: str, **arrays: Any) -> None:
    """Checks that the arrays have one dtype, float32 or bfloat16.

    Raises:
      TypeError: naming every argument with its dtype.
    """
    floating(op, **arrays)
    if len({array.dtype for array in arrays.values()}) > 1:
        text = ", ".join(f"{name} is {array.dtype}" for name, array in arrays.items())
        raise TypeError(f"{op}: {text}; cast them to one dtype")


def grouped_heads(op: str, size: Mapping[str, int], axes: str = "BTSNKH") -> None:
    """Checks that none of `axes` is empty, and that K heads of keys divide N heads of queries.

    Raises:
      ValueError: naming the axis, or both numbers.
    """
    for letter in axes:
        if size[letter] == 0:
            raise ValueError(f"{op}: {letter} = 0; pass at least one")
    N, K = size["N"], size["K"]
    if N % K:
        raise ValueError(f"{op}: q has N = {N} heads, no multiple of the K = {K} heads of k")

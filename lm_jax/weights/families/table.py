"""Weight maps as tables: which checkpoint tensor fills which parameters, in both directions.

An `Entry` is one checkpoint tensor; `{l}` in its name stands for the layer. `read` takes the
tensor to the parameters it fills (one layer of each) and `write` is its inverse. A `Family` is a
reader and a writer of configs and a table; all that is particular to a family is there.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model import decoder
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.params import ParamSpec

Read = Callable[..., tuple[np.ndarray, ...]]
Write = Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One checkpoint tensor of shape `shape` and the parameters, by path, that it fills.

    With `heads`, it is a tensor for each of so many heads, `{n}` in the name: `read` takes all and
    `write` gives them stacked on a leading axis. `layers` are those that have it, in the order of
    the stack that they fill; None: all.
    """

    name: str
    params: tuple[str, ...]
    shape: tuple[int, ...]
    read: Read
    write: Write
    heads: int | None = None
    layers: range | None = None

    @property
    def per_layer(self) -> bool:
        return "{l}" in self.name


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    `read_config` takes a transformers config; `write_config` gives the content of config.json but
    for `name` (its model_type) and `architecture`.
    `prefix` opens every name but that of the output head; files saved from the bare model lack it.
    `nested` opens those names instead in a checkpoint of which the decoder is one part.
    `ignored` are regular expressions of stored buffers that are not weights, and of other parts.
    `unused` are names of weights that are often stored and that a decoder does not read.
    """

    name: str
    architecture: str
    read_config: Callable[[Any], DecoderConfig]
    write_config: Callable[[DecoderConfig], dict[str, Any]]
    entries: Callable[[DecoderConfig], list[Entry]]
    prefix: str = "model."
    head: str = "lm_head.weight"
    nested: str | None = None
    ignored: Sequence[str] = ()
    unused: Callable[[DecoderConfig], Sequence[str]] = lambda cfg: ()

    def ignores(self, name: str) -> bool:
        """True for the name of a stored buffer that is no weight."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def name_in_table(self, stored: str, *, bare: bool) -> str:
        """The name in the table of a stored tensor, of a file of the bare model or of a whole."""
        if self.nested is not None and stored.startswith(self.nested):
            return self.prefix + stored.removeprefix(self.nested)
        return self.prefix + stored if bare and stored != self.head else stored


class Tables:
    """Makes entries for one config; shapes come from the parameter declaration alone."""

    def __init__(self, cfg: DecoderConfig):
        if not cfg.mlp_size:
            raise BadInputError(
                f"mlp_size = 0: blocks of family {cfg.family} have MLPs (intermediate_size); give "
                "their width"
            )
        self.specs = dict(params_lib.leaves(decoder.param_spec(cfg)))

    def one_layer(self, path: str) -> tuple[int, ...]:
        """The shape of a parameter, without its layer axis."""
        spec: ParamSpec = self.specs[path]
        return spec.shape[1:] if spec.axes.startswith("L") else spec.shape

    def same(self, name: str, path: str) -> Entry:
        """A tensor stored as we store it."""
        return Entry(name, (path,), self.one_layer(path), lambda w: (w,), lambda a: a)

    def layer_norm(self, name: str, path: str) -> list[Entry]:
        """A norm with weight and bias."""
        return [
            self.same(name + ".weight", path + "/scale"),
            self.same(name + ".bias", path + "/bias"),
        ]

    def flat(self, name: str, path: str) -> Entry:
        """A vector stored flat that we split in heads."""
        shape = self.one_layer(path)
        return Entry(
            name, (path,), (math.prod(shape),), lambda w: (w.reshape(shape),), lambda a: a.ravel()
        )

    def by_head(self, name: str, path: str) -> Entry:
        """A parameter whose heads, its first axis, are stored as a tensor each."""
        heads, *shape = self.one_layer(path)
        return Entry(
            name, (path,), tuple(shape), lambda *w: (np.stack(w),), lambda a: a, heads=heads
        )

    def linear(self, name: str, path: str, *, inputs: int = 1, transposed: bool = True) -> Entry:
        """A matrix, stored [out, in] (or [in, out]) where we hold `inputs` input axes first."""
        shape = self.one_layer(path)
        size_in, size_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        if transposed:
            return Entry(
                name,
                (path,),
                (size_out, size_in),
                lambda w: (w.T.reshape(shape),),
                lambda a: a.reshape(size_in, size_out).T,
            )
        return Entry(
            name,
            (path,),
            (size_in, size_out),
            lambda w: (w.reshape(shape),),
            lambda a: a.reshape(size_in, size_out),
        )


def by_stack(
    cfg: DecoderConfig, block_entries: Callable[[DecoderConfig], list[Entry]]
) -> list[Entry]:
    """The entries of all blocks, stack by stack where layers differ in shape."""
    stacks = cfg.stacks
    if len(stacks) == 1:
        return block_entries(stacks[0].cfg)
    return [
        dataclasses.replace(
            entry,
            params=tuple(p.replace("blocks/", f"blocks/{stack.name}/", 1) for p in entry.params),
            layers=stack.layers,
        )
        for stack in stacks
        for entry in block_entries(stack.cfg)
    ]


def check(
    entries: Sequence[Entry],
    cfg: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises unless the table and the checkpoint cover each other exactly.

    Args:
      entries: the family's table for `cfg`.
      cfg: the model to fill.
      shapes: the shape of every weight in the checkpoint.

    Raises:
      BadInputError: listing every missing, unused, misshapen tensor at once, and every parameter
        that the table fills twice or not at all.
    """
    absurd = [
        f"{size} {things}"
        for size, things in (
            (cfg.num_layers, "layers"),
            (max(entry.heads or 0 for entry in entries), "heads"),
        )
        if size > len(shapes)
    ]
    if absurd:
        raise BadInputError(
            f"a config of {' and '.join(absurd)} is absurd for weights of {len(shapes)} tensors; "
            "take weights and config of one model"
        )
    problems = []
    filled: list[str] = [path for entry in entries for path in entry.params]
    declared = {path for path, _ in params_lib.leaves(decoder.param_spec(cfg))}
    problems += [f"{path} filled twice" for path in sorted(set(filled)) if filled.count(path) > 1]
    problems += [f"{path} filled by nothing" for path in sorted(declared - set(filled))]
    problems += [f"{path} is no parameter" for path in sorted(set(filled) - declared)]
    wanted = {name: entry.shape for entry in entries for name in names(entry, cfg.num_layers)}
    problems += [f"missing {name}" for name in wanted if name not in shapes]
    problems += [f"unused {name} {shapes[name]}" for name in shapes if name not in wanted]
    problems += [
        f"{name} has shape {shapes[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        listed = "; ".join(problems[:20]) + (
            f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        )
        raise BadInputError(
            f"checkpoint does not fit its config ({len(problems)} differences): {listed}; take "
            "weights and config of one model"
        )


def names_by_layer(entry: Entry, num_layers: int) -> list[list[str]]:
    """The checkpoint names of an entry in each layer: one, or one for each head."""
    numbers = range(num_layers) if entry.layers is None else entry.layers
    layers = [entry.name.replace("{l}", str(i)) for i in numbers]
    if not entry.per_layer:
        layers = [entry.name]
    if entry.heads is None:
        return [[name] for name in layers]
    return [[name.replace("{n}", str(n)) for n in range(entry.heads)] for name in layers]


def names(entry: Entry, num_layers: int) -> list[str]:
    """All checkpoint names of an entry."""
    return [name for layer in names_by_layer(entry, num_layers) for name in layer]

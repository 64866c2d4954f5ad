"""A sparse model on disk: a pretrained folder with the parameters of its gates.

    <folder>/                 what `transformers` reads: config.json, model.safetensors, the
                              tokenizer (adapters are merged in)
    <folder>/sparse.json      the gates, the digest of their weights, and numbers of the run
    <folder>/README.md        the model card

The weights may be adapters over a base (`save_over`): a folder of PEFT in place of the first line.
Loaded without its gates, by another library, it is a dense model with changed weights; so
`lm_jax.load_pretrained` refuses it.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import os
from pathlib import Path
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from lm_jax import report
from lm_jax.assets import published
from lm_jax.errors import UsageError
from lm_jax.inspect.run import Run
from lm_jax.model.attention import PerLayer
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward
from lm_jax.model.lora import LoraConfig
from lm_jax.model.params import ParamTree
from lm_jax.model.sites import Reducer
from lm_jax.run.files import read_json, write_bytes, write_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.weights import card as cards
from lm_jax.weights import hub
from lm_jax.weights.gates import (
    FORMAT,
    StoredGates,
    checked_gates,
    gates_of,
    identity,
    read_note,
)
from lm_jax.weights.load import OpenedModel, Pretrained, load_pretrained, open_pretrained
from lm_jax.weights.peft import save_peft
from lm_jax.weights.safetensors import CONFIG
from lm_jax.weights.save import save_pretrained
from sparse_jax.gates.attend import by_kernels, gated
from sparse_jax.gates.open_edges import open_edges

SPARSE = hub.GATES


@struct.dataclass
class Gates(StoredGates):
    """Parameters of the gates, with the attend that computes them."""

    def attend(
        self,
        cfg: DecoderConfig,
        *,
        mode: str = "threshold",
        key: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
    ) -> PerLayer:
        """The attend of these gates on scores; `attend.by_kernels` turns it into the fused one."""
        return gated(
            cfg,
            mode=mode,
            key=key,
            bias=jnp.asarray(self.bias_LN),
            valid_BT=valid_BT,
            raw_gate=self.raw_gate,
            renormalise=self.renormalise,
        )


@dataclasses.dataclass(frozen=True)
class SparseModel:
    """A model with its gates; `numbers` are the results in its model card, by name."""

    base: Pretrained
    gates: Gates
    numbers: Mapping[str, Any]

    def __repr__(self) -> str:
        """The model in words, and the numbers of its card."""
        return "\n".join([f"SparseModel of {self.base!r}", *map(": ".join, self._formatted())])

    def _repr_html_(self) -> str:
        rows = [[name, value] for name, value in self._formatted()]
        caption = f"Sparse model: {self.cfg.sizes}"
        return report.table(["of its model card", ""], rows, caption=caption)

    def _formatted(self) -> Iterator[tuple[str, str]]:
        return ((name, cards.shown(value)) for name, value in self.numbers.items())

    @property
    def cfg(self) -> DecoderConfig:
        return self.base.cfg

    @property
    def params(self) -> dict[str, Any]:
        return self.base.params

    @property
    def identity(self) -> ModelIdentity:
        """The identity of the model with its gates."""
        return identity(self.base, self.gates)

    def with_params(self, params: Any) -> "SparseModel":
        """The same model with other weights, such as an argument of a compiled function."""
        return dataclasses.replace(self, base=dataclasses.replace(self.base, params=params))

    def run(
        self, text: Any, *, record: Sequence[str] | Mapping[str, Reducer] = (), edits: Any = None
    ) -> Run:
        """Runs the model, gates open where their logit is above 0; see `lm_jax.Pretrained.run`."""
        return self.base.run(text, record=record, edits=edits, attend=self.gates.attend(self.cfg))

    def forward(
        self,
        tokens_BT: jax.Array,
        *,
        mode: str = "threshold",
        key: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
        **options: Any,
    ) -> Output:
        """The forward pass with gates that are open where their logit is above 0.

        Args:
          tokens_BT: ids.
          mode: "threshold", "expected" (an edge is open by its probability) or "sample".
          key: random key of the samples; for "sample" alone.
          valid_BT: false where a token is padding.
          **options: options of `lm_jax.forward`. Scores are only formed where `attn.scores` or
            `attn.pattern` is recorded or edited.
        """
        check_batch_axis(tokens_BT)
        gates = {"mode": mode, "key": key, "valid_BT": valid_BT}
        return gated_forward(self.params, tokens_BT, self.cfg, self.gates, **gates, **options)

    def open_edges(self, tokens_BT: jax.Array, *, valid_BT: jax.Array | None = None) -> pa.Table:
        """The open attention edges of all layers on given tokens, one row per edge.

        Deterministic gates, as in `forward`, from the edge list of the attention kernel: no map of
        queries by keys is formed. `edge_graph.draw_open_edges` draws the table.

        Args:
          tokens_BT: ids.
          valid_BT: false where a token is padding, at the end of its row.

        Returns:
          a table of `layer`, `head` (of the queries), `query`, `key` (positions in the row) and
          `weight` (the gated attention weight, float32), in this order; with more than one row,
          `batch` is the first column. Every open edge is in it.
        """
        check_batch_axis(tokens_BT)
        attend = self.gates.attend(self.cfg, valid_BT=valid_BT)
        return open_edges(self.params, tokens_BT, self.cfg, attend, valid_BT=valid_BT)


def check_batch_axis(tokens_BT: jax.Array) -> None:
    """Raises UsageError for ids of another shape than rows of tokens."""
    shape = np.shape(tokens_BT)
    if len(shape) != 2:
        raise UsageError(
            f"tokens_BT has shape {shape}; give rows of ids [B, T], such as ids[None] for one row"
        )


def gated_forward(
    params: Any,
    tokens_BT: jax.Array,
    cfg: DecoderConfig,
    gates: Gates,
    *,
    mode: str = "threshold",
    key: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
    **options: Any,
) -> Output:
    """The forward pass of `SparseModel.forward`, of weights that may be traced."""
    on_scores = gates.attend(cfg, mode=mode, key=key, valid_BT=valid_BT)
    touched = {*(options.get("record") or ()), *(options.get("edits") or ())}
    formed = bool({"attn.scores", "attn.pattern"} & touched)
    attend = on_scores if formed else by_kernels(on_scores)
    return forward(params, tokens_BT, cfg, attend=attend, valid_BT=valid_BT, **options)


def save(
    folder: str | os.PathLike[str], model: Pretrained, gates: Gates, numbers: Mapping[str, Any]
) -> None:
    """Writes a sparse model; `model` holds the weights in the dtype of the computation.

    `sparse.json` is written last, so that a folder without it is no sparse model.

    Raises:
      BadInputError: the folder exists.
      StorageError: it cannot be written.
    """
    folder = Path(folder)
    save_pretrained(folder, model.cfg, model.params, model.tokenizer)
    # A copy without the gates is then known to lack them; transformers ignores the field.
    config = read_json(folder / CONFIG)
    write_json(folder / CONFIG, config | {hub.GATES_FIELD: SPARSE})
    _add_gates(folder, model, gates, numbers)


def save_over(
    folder: str | os.PathLike[str],
    name: str,
    base: Pretrained,
    adapters: ParamTree,
    settings: LoraConfig,
    gates: Gates,
    numbers: Mapping[str, Any],
) -> None:
    """Writes a sparse model as a folder of PEFT with gates, whose base stays where it is.

    Args:
      folder: new folder.
      name: name of the base, as `lm_jax.load_pretrained` takes it, which the folder is read with.
      base: the dense model.
      adapters: parameters of the adapters over it.
      settings: settings of the adapters.
      gates: the gates.
      numbers: results in the model card, by name.

    Raises:
      BadInputError: the folder exists, or the base cannot be read by its name.
      StorageError: it cannot be written.
    """
    folder = Path(folder)
    save_peft(folder, base, adapters, settings, name=name)
    _add_gates(folder, base, gates, numbers)


def _add_gates(folder: Path, model: Pretrained, gates: Gates, numbers: Mapping[str, Any]) -> None:
    """Adds the card and, last, the gates to a folder of weights."""
    write_bytes(folder / cards.CARD, card(model.cfg.family, gates, numbers).encode())
    # Of the files, as they will be read.
    identity = open_pretrained(folder, without_gates=True).identity
    note = {
        "format": FORMAT,
        "weights_sha256": identity.weights,
        "identity": identity.text,
        "family": model.cfg.family,
        "gate_bias": gates.bias_LN.tolist(),
        "raw_gate": gates.raw_gate,
        "renormalise": gates.renormalise,
        "numbers": dict(numbers),
    }
    write_json(folder / SPARSE, note)


def replace_numbers(folder: str | os.PathLike[str], numbers: Mapping[str, Any]) -> None:
    """Replaces the numbers of a folder that `save` wrote, and those of its card.

    Raises:
      BadInputError, CorruptError: as `read_note`.
    """
    note, folder = read_note(folder) | {"numbers": dict(numbers)}, Path(folder)
    write_bytes(
        folder / cards.CARD, card(note["family"], _as_gates(gates_of(note)), numbers).encode()
    )
    write_json(folder / SPARSE, note)


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
) -> SparseModel:
    """Reads a folder that `save` wrote, or the published sparse model of that name.

    Raises:
      BadInputError: it is no sparse model, or the gates belong to another family or shape than the
        weights.
      CorruptError: its weights are not those it was saved with, or a file is damaged.
    """
    folder = published.resolve_model(folder)
    note = read_note(folder)
    base = load_pretrained(folder, dtype=dtype, mesh=mesh, without_gates=True)
    return SparseModel(base, _checked_gates(folder, note, base), note["numbers"])


def verified_card(folder: Path) -> str:
    """The model card of a sparse model, whose weights and gates are compared with one another.

    Raises:
      BadInputError, CorruptError: as `load`.
    """
    note, (_, gates) = read_note(folder), open_gates(folder)
    return card(note["family"], gates, note["numbers"])


def open_gates(folder: str | os.PathLike[str]) -> tuple[OpenedModel, Gates]:
    """A sparse model whose weights are not loaded, but compared with its gates.

    Raises:
      BadInputError, CorruptError: as `load`.
    """
    folder = published.resolve_model(folder)
    note, opened = read_note(folder), open_pretrained(folder, without_gates=True)
    return opened, _checked_gates(folder, note, opened)


def _checked_gates(folder: Path, note: Mapping[str, Any], base: Pretrained | OpenedModel) -> Gates:
    """The gates of a folder, if they belong to its weights."""
    return _as_gates(checked_gates(folder, note, base))


def open_identity(folder: str | Path) -> ModelIdentity:
    """The identity of a sparse model, without loading its weights.

    Raises:
      BadInputError, CorruptError: as `load`.
    """
    folder = published.resolve_model(folder)
    opened = open_pretrained(folder, without_gates=True)
    return identity(opened, gates_of(read_note(folder)))


def _as_gates(stored: StoredGates) -> Gates:
    return Gates(stored.bias_LN, stored.raw_gate, stored.renormalise)


def constant_gates(
    cfg: DecoderConfig, bias: float, *, raw_gate: bool = False, renormalise: bool = False
) -> Gates:
    """Gates with the same bias in all layers and heads."""
    bias_LN = np.full((cfg.num_layers, cfg.num_heads), bias, np.float32)
    return Gates(bias_LN, raw_gate, renormalise)


def card(family: str, gates: Gates, numbers: Mapping[str, Any]) -> str:
    """The model card, in Markdown, from the numbers of a post-training run."""
    score = "q.k" if gates.raw_gate else "scale * q.k"
    weights = (
        "the weights of the open ones are divided by their sum"
        if gates.renormalise
        else "the open ones keep their weights from the softmax over all keys"
    )
    return cards.card(
        cards.SPARSE_TITLE,
        "Post-trained so that most attention edges are closed at nearly the loss of the dense "
        "model. Every edge (query, key) of a head has a gate, open where "
        f"{score} + bias > 0; a closed edge has weight 0, and {weights}.",
        {"family": family} | dict(numbers),
        'Load it with its gates: `sparse_jax.load("this folder")`, then `model.forward(tokens)`, '
        'or in torch `model, gates = sparse_jax.torch_gates.load("this folder")`. '
        "Without them (`transformers` alone) it is a dense model with changed weights, and the "
        "numbers above do not hold. It inherits the licence and the limits of its base.",
    )

"""Runs a model over the beginnings of documents and stores every gate in a parquet file.

Prototype Transformer, section 5.1. A text is the beginning of a document, cut to one length, that
has at least `LEAST` tokens besides the marks around a document. `activations.parquet` has one row
per token that the model read, text by text:

    text        int32    number of the text, from 0
    document    int64    number of its document in the split
    position    int32    in the text, from 0
    token       int32    id
    mark        bool     `<bos>`, `<eos>` or `<eot>`, which no statistic counts
    loss        float32  -log p(token | tokens before it) in nats; null for the first of a text
    write_<l>   float16  [R], write gates of layer l = 0, 1, ...
    read_<l>    float16  [R], read gates

Gates are read back one layer at a time, so that memory holds either one batch of all layers or all
texts of one layer.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import os
from pathlib import Path
import types
from typing import Any

import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from lm_jax.errors import BadInputError
from lm_jax.model import sites
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import forward
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.run import progress, stop
from lm_jax.run.files import replace_file
from lm_jax.run.provenance import find_provenance
from lm_jax.run.tables import metadata
from lm_jax.text.examples import Examples, OnePass
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import BOS, END_OF_TEXT, EOS, PAD
from protot_jax.training.saved_run import TrainedModel

ACTIVATIONS = "activations.parquet"
# Shorter texts say little about a concept; the same limit as in the released code.
LEAST = 5
GATES = ("write", "read")


@dataclasses.dataclass(frozen=True)
class Texts:
    """The analysed texts, N of up to T tokens.

    Attributes:
      document_N: number of the document in its split.
      token_NT: ids, 0 after the end.
      token_mask_NT: true for tokens that statistics count: neither padding nor marks.
      loss_NT: nats; NaN where nothing was predicted.
    """

    document_N: np.ndarray
    token_NT: np.ndarray
    token_mask_NT: np.ndarray
    loss_NT: np.ndarray

    @property
    def read_NT(self) -> np.ndarray:
        """True for tokens that the model read, marks included."""
        return self.token_NT != 0

    def perplexity(self, text: int | slice) -> float:
        """exp of the mean loss over the counted tokens that were predicted."""
        losses = self.loss_NT[text][self.token_mask_NT[text]]
        return float(np.exp(np.nanmean(losses)))


def collect(
    model: TrainedModel,
    examples: Examples,
    path: str | os.PathLike[str],
    *,
    texts: int,
    batch_size: int,
) -> Texts:
    """Writes the gates of the first `texts` texts that are long enough, or of all if fewer.

    Args:
      model: a model with prototypes.
      examples: beginnings of documents, `mode="truncate"`.
      path: the parquet file, which is written whole or not at all.
      texts: maximum number of texts.
      batch_size: texts of one forward pass.

    Raises:
      UsageError: the model has no prototypes.
      BadInputError: no document is long enough.
      StorageError: the file cannot be written.
      StoppedError: the command was asked to stop; no file is left.
    """
    schema = _schema(model.cfg.num_layers, model.prototypes.num_prototypes)
    provenance = find_provenance(Path(path).absolute().parent)
    if provenance is not None:
        schema = schema.with_metadata(metadata(provenance))
    results: list[Texts] = []
    count = 0
    with (
        replace_file(path) as file,
        pq.ParquetWriter(file, schema, compression="zstd", compression_level=1) as writer,
        progress.track("read", min(texts, examples.count), unit="texts") as advance,
    ):
        for part in long_enough(examples, marks(model.tokenizer), texts, batch_size):
            stop.check("while reading texts")
            n = len(part.token_NT)
            tokens_BT = np.pad(part.token_NT, ((0, batch_size - n), (0, 0)))
            loss_BT, records = jax.device_get(read(model, tokens_BT, _GATE_SITES))
            gates = {gate: records[f"mixer.{gate}"] for gate in GATES}
            part.loss_NT[:, 1:] = np.where(part.read_NT[:, 1:], loss_BT[:n], np.nan)
            writer.write_table(_rows(part, count, gates, schema))
            results.append(part)
            count += n
            advance(n)
        if not results:
            raise BadInputError(
                f"{examples.prepared.folder}: no document of {examples.split} has {LEAST} tokens "
                "in its beginning; give longer documents, or another split"
            )
    fields = (field.name for field in dataclasses.fields(Texts))
    return Texts(*(np.concatenate([getattr(part, name) for part in results]) for name in fields))


def gates_of_layer(path: str | os.PathLike[str], texts: Texts, gate: str, layer: int) -> np.ndarray:
    """Reads the write or read gates of one layer, float32 `[N, T, R]`, 0 after the end."""
    name = f"{gate}_{layer}"
    column = pq.read_table(path, columns=[name])[name].combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False)
    gate_NTR = np.zeros((*texts.token_NT.shape, column.type.list_size), np.float32)
    gate_NTR[texts.read_NT] = values.reshape(-1, column.type.list_size)
    return gate_NTR


def marks(tokenizer: Tokenizer) -> np.ndarray:
    """Ids of the tokens that mark the ends of documents, and of padding."""
    named = (tokenizer.backend.token_to_id(mark) for mark in (PAD, BOS, EOS, END_OF_TEXT))
    ids = {0, tokenizer.bos_id, tokenizer.eos_id, *named}
    return np.array(sorted(i for i in ids if i is not None))


def long_enough(
    examples: Examples, marks: np.ndarray, texts: int, batch_size: int
) -> Iterator[Texts]:
    """The first `texts` texts of a split, up to `batch_size` at a time, with losses of NaN."""
    batches = OnePass(examples, batch_size=batch_size)
    for k in range(batches.per_epoch):
        batch = batches.at(k)
        token_mask_NT = ~np.isin(batch["tokens"], marks)
        kept = np.flatnonzero(token_mask_NT.sum(1) >= LEAST)[:texts]
        texts -= len(kept)
        if len(kept):
            token_NT = batch["tokens"][kept]
            losses_NT = np.full(token_NT.shape, np.nan, np.float32)
            yield Texts(batch["document"][kept], token_NT, token_mask_NT[kept], losses_NT)
        if not texts:
            return


Record = tuple[tuple[str, sites.Reducer], ...]
_GATE_SITES: Record = tuple((f"mixer.{gate}", sites.keep) for gate in GATES)


def read(
    model: TrainedModel,
    tokens_BT: np.ndarray,
    record: Record = (),
    edits: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses `[B, T - 1]` of tokens 1.., and what is recorded, by site; an id of 0 is padding."""
    return _read(
        model.params, tokens_BT, dict(edits), cfg=model.cfg, mixer=model.mixer, record=record
    )


@functools.partial(exact_jit, static_argnames=("cfg", "mixer", "record"))
def _read(
    params: ParamTree,
    tokens_BT: jax.Array,
    edits: dict[str, Any],
    *,
    cfg: DecoderConfig,
    mixer: Mixer,
    record: Record,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    out = forward(
        params,
        tokens_BT,
        cfg,
        mixer=mixer,
        valid_BT=tokens_BT != 0,
        record=dict(record),
        edits=edits,
    )
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(out.logits[:, :-1], tokens_BT[:, 1:])
    return loss_BT, out.records


def _schema(L: int, R: int) -> pa.Schema:
    gates = pa.list_(pa.float16(), R)
    return pa.schema(
        [
            ("text", pa.int32()),
            ("document", pa.int64()),
            ("position", pa.int32()),
            ("token", pa.int32()),
            ("mark", pa.bool_()),
            ("loss", pa.float32()),
            *((f"{gate}_{layer}", gates) for layer in range(L) for gate in GATES),
        ]
    )


def _rows(part: Texts, first: int, gates: dict[str, np.ndarray], schema: pa.Schema) -> pa.Table:
    read_NT = part.read_NT
    row, position = np.nonzero(read_NT)
    columns = [
        pa.array(first + row, pa.int32()),
        pa.array(part.document_N[row]),
        pa.array(position, pa.int32()),
        pa.array(part.token_NT[read_NT]),
        pa.array(~part.token_mask_NT[read_NT]),
        pa.array(part.loss_NT[read_NT], from_pandas=True),
    ]
    for gates_BTR in (gates[gate][layer] for layer in range(len(gates["write"])) for gate in GATES):
        # By numpy: XLA may not compile the conversion for a CPU without an instruction for it.
        gate_MR = gates_BTR[: len(read_NT)][read_NT].astype(np.float16)
        values = pa.array(gate_MR.ravel())
        columns.append(pa.FixedSizeListArray.from_arrays(values, gates_BTR.shape[-1]))
    return pa.Table.from_arrays(columns, schema=schema)

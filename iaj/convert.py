"""Converts a Hugging Face folder or hub id, a GGUF file or a manifest name to an orbax checkpoint.

    iaj convert smollm2 checkpoints/smollm2
    iaj convert SOURCE OUT --dtype bfloat16 --mesh 1,8,1
    iaj convert ORG/NAME@REVISION OUT --download

OUT is a new folder that `lm_jax.load_pretrained` reads on any mesh:

    config.json      the `DecoderConfig`
    arrays/          the parameters, sharded by --mesh (data,fsdp,tensor; -1 is all other devices)
    tokenizer*.json  if the source has a tokenizer
    MANIFEST.json    sizes and sha256 of all files, digest of the source, versions; written last

Exit codes: 0 done, 2 usage, 3 SOURCE cannot be used or OUT exists, 5 storage, 7 SOURCE is a
converted checkpoint that does not match its manifest.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from iaj.parser import Parser, run_parsed
import lm_jax
from lm_jax.checkpoint.folder import save_checkpoint
from lm_jax.errors import UsageError
from lm_jax.parallel import sharding
from lm_jax.run.files import check_new, to_jsonable, write_json
from lm_jax.run.provenance import collect_provenance
from lm_jax.weights import hub
from lm_jax.weights.load import CONFIG

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    download: bool = False,
) -> dict[str, Any]:
    """Writes the new folder `out` and returns its manifest.

    Args:
      source, dtype, mesh, download: the arguments of `load_pretrained`.
      out: the new folder.

    Raises:
      BadInputError: the source cannot be used (`load_pretrained`), or `out` exists.
      StorageError: `out` cannot be written.
    """
    check_new(out)
    model = lm_jax.load_pretrained(source, dtype=dtype, mesh=mesh, download=download)
    tokenizer = model.tokenizer

    def beside(folder: Path) -> None:
        write_json(folder / CONFIG, dataclasses.asdict(model.cfg))
        if tokenizer is not None:
            tokenizer.save(folder)

    provenance = collect_provenance(
        dtype=str(jnp.dtype(dtype)),
        data=hub.identity("weights", model.sha256, model.revision),
        tokenizer=None if tokenizer is None else tokenizer.sha256,
    )
    notes = {
        "source": Path(source).name,
        "mesh": mesh and dict(mesh.shape),
        "provenance": to_jsonable(provenance),
    }
    return save_checkpoint(out, model.params, notes=notes, beside=beside)


def show(out: Path, manifest: dict[str, Any]) -> None:
    """Prints the files of the checkpoint."""
    table = Table("file", "bytes", "sha256")
    table.columns[1].justify = "right"
    table.columns[0].overflow = "fold"
    for name, entry in manifest["files"].items():
        table.add_row(name, f"{entry['size']:,}", entry["sha256"][:16])
    Console(markup=False).print(table)
    dtypes = sorted({entry["dtype"] for entry in manifest["arrays"].values()})
    size = sum(entry["size"] for entry in manifest["files"].values())
    print(
        f"{out}: {manifest['parameters']:,} parameters, {', '.join(dtypes)}, {size / 1e6:,.1f} MB; "
        f"from {manifest['notes']['source']}, sha256 "
        f"{manifest['notes']['provenance']['data']['weights'][:16]}"
    )


def _mesh(text: str | None) -> jax.sharding.Mesh | None:
    if text is None:
        return None
    try:
        data, fsdp, tensor = (int(size) for size in text.split(","))
    except ValueError as error:
        raise UsageError(f"--mesh={text}: give three sizes, data,fsdp,tensor") from error
    return sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


def run(arguments: argparse.Namespace) -> None:
    """Converts by the parsed arguments."""
    mesh = _mesh(arguments.mesh)
    dtype, download = DTYPES[arguments.dtype], arguments.download
    manifest = convert(arguments.source, arguments.out, dtype=dtype, mesh=mesh, download=download)
    show(arguments.out, manifest)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; an error is one line on standard error."""
    parser = Parser("iaj convert", __doc__)
    parser.add_argument("source", metavar="SOURCE", help="folder, .gguf file, asset or hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder of the checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    parser.add_argument("--mesh", metavar="D,F,T", help="sizes of data, fsdp and tensor")
    parser.add_argument("--download", action="store_true", help="fetch what the hub's cache lacks")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

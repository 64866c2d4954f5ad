"""Builds a subset of FineWeb-Edu, or of another corpus of parquet files, to pretrain on.

    iaj protot subset --source=fineweb_edu --workdir=data/fineweb_edu_250m
    iaj protot subset --source=fineweb_edu --documents=338695,18015,3603 --workdir=data/paper

Prototype Transformer, section 4: 250 M tokens of FineWeb-Edu, 338,695 documents to train on, 18,015
for validation and 3,603 to test; which documents is not said. Those of `--source`, a folder of your
.parquet files, are taken in order of file names and rows: until there are `--tokens`, or with
`--documents` exactly so many of each split. `--workdir` is a new folder, with

    documents.parquet   id, dump and text
    tokenizer.json      BPE of 16,000 tokens, by which they are counted
    subset.json         files with sha256, dumps, order, counts of every split, sha256 of the ids

The last lines printed are the flags of `iaj protot pretrain` for these documents and these splits.
Nothing is fetched: get the files of a sample or a dump with a client of your choice.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from lm_jax.console import cli, terminal
from lm_jax.errors import UsageError
from lm_jax.run.files import verify_manifest
from lm_jax.run.settings import CommandOptions, at_least
from lm_jax.text.subset import FORMAT, MANIFEST, SubsetConfig, build_subset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """The files, and how much of them is taken.

    Attributes:
      source: folder of .parquet files, with columns of texts and ids.
      tokens: number of tokens at which reading ends.
      documents: numbers of documents to train on, validate and test, instead of --tokens.
      seed: random seed of the splits.
      vocab_size: number of tokens of the tokenizer.
      dump: name of the dump, where the files have no column of that name.
      text: column of the texts.
      id: column of the ids.
    """

    source: Path
    tokens: Annotated[int, at_least(1)] = 250_000_000
    documents: tuple[str, ...] = ()
    seed: Annotated[int, at_least(0)] = 0
    vocab_size: Annotated[int, at_least(1)] = 16_000
    dump: str = ""
    text: str = "text"
    id: str = "id"


def config_from_options(options: Options) -> SubsetConfig:
    """The options as the settings of a subset.

    Raises:
      UsageError: the numbers of documents are no three numbers.
    """
    counts = options.documents
    if counts and (len(counts) != 3 or not all(count.isdigit() for count in counts)):
        raise UsageError(
            f"--documents={','.join(counts)} must be three numbers, such as 338695,18015,3603"
        )
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del values["source"], values["documents"]
    train, validation, test = map(int, counts or (0, 0, 0))
    return SubsetConfig(**values, counts=(train, validation, test) if counts else None)


def format_subset(manifest: dict[str, Any], folder: Path) -> str:
    """Documents and tokens by split, and the flags to train on them."""
    rows = [
        [split, f"{counts['documents']:,}", f"{counts['tokens']:,}"]
        for split, counts in manifest["splits"].items()
    ]
    rows.append(["all", f"{manifest['documents']:,}", f"{manifest['tokens']:,}"])
    table = terminal.format_table(["split", "documents", "tokens"], rows, left=(0,))
    config = manifest["config"]
    lines = [
        table,
        f"dumps: {', '.join(name or 'not named' for name in manifest['dumps'])}",
        f"sha256 of the ids: {manifest['ids_sha256']}",
        "",
        f"--config.corpus.source={folder}",
        "--config.corpus.unit=document",
        f"--config.corpus.seed={config['seed']}",
        f"--config.corpus.vocab_size={config['vocab_size']}",
        f'--config.corpus.splits="({", ".join(map(repr, manifest["shares"]))})"',
    ]
    return "\n".join(lines)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config, folder = config_from_options(arguments.options), arguments.folder
    if (folder / MANIFEST).is_file():
        manifest = verify_manifest(folder, FORMAT)
        stored = SubsetConfig(**_tuples(manifest["config"]))
        if stored != config:
            raise UsageError(f"{folder} was built with other settings; name another --workdir")
        print("finished before")
    else:
        manifest = build_subset(arguments.options.source, folder, config)
    print(format_subset(manifest, folder))


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


if __name__ == "__main__":
    cli.app(main, options=Options)

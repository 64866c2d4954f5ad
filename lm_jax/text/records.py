"""ArrayRecord files of prepared data: one record per document, a file per split."""

from collections.abc import Generator, Iterator, Sequence
import contextlib
from pathlib import Path
from typing import Any

from lm_jax.errors import BadInputError, StorageError
from lm_jax.run.files import STORAGE_REMEDY


def records_file(split: str) -> str:
    """The name of a split's ArrayRecord file."""
    return f"{split}-00000-of-00001.array_record"


def open_records(file: Path, options: str = "") -> Any:
    """An ArrayRecordReader of a file.

    Raises:
      BadInputError: it cannot be read.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        return ArrayRecordReader(str(file), options)
    except RuntimeError as error:
        raise unreadable(file, error) from error


def read_records(file: Path) -> list[bytes]:
    """All records of a file, in order.

    Raises:
      BadInputError: it cannot be read.
    """
    reader = open_records(file)
    try:
        return reader.read_all() if reader.num_records() else []
    except RuntimeError as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: RuntimeError) -> BadInputError:
    """The error of a file that ArrayRecord cannot read."""
    reason = str(error).splitlines()[0]
    return BadInputError(
        f"{file} cannot be read ({reason}); remove the folder and prepare the data again"
    )


class RecordWriters:
    """One ArrayRecord file per split in `draft`; `folder` is the path in error messages."""

    def __init__(self, draft: Path, folder: Path, splits: Sequence[str]):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._folder = folder
        with self._storage_errors():
            # One record per chunk, so that reading one document decompresses no other.
            self._open = {
                split: ArrayRecordWriter(str(draft / records_file(split)), "group_size:1")
                for split in splits
            }

    def __call__(self, split: str, record: bytes) -> None:
        with self._storage_errors():
            self._open[split].write(record)

    def close(self) -> None:
        while self._open:
            with self._storage_errors():
                self._open.popitem()[1].close()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        # What the package raises for a full disk, and often no earlier than on closing.
        except RuntimeError as error:
            raise StorageError(
                f"{self._folder} cannot be written ({error}); {STORAGE_REMEDY}"
            ) from error


@contextlib.contextmanager
def record_writers(draft: Path, folder: Path, splits: Sequence[str]) -> Generator[RecordWriters]:
    """`RecordWriters` that are closed when an error ends the block."""
    writers = RecordWriters(draft, folder, splits)
    try:
        yield writers
    except BaseException:
        # Its threads must not write on into a draft that is being removed. The error in flight
        # matters more than one of closing.
        with contextlib.suppress(StorageError):
            writers.close()
        raise

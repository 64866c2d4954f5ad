"""Stored results: what a run measured, kept in `results/<study>/<name>/` of a checkout.

Each folder has `result.toml`, which says what was measured, by which command, at what cost and how
closely a second run must agree, and beside it `summary.json`, `provenance.json` and, where they are
small, the rows that the summary is computed from. Pages are rendered from these files alone
(`tools/render_docs.py`), and `iaj reproduce NAME` runs the command again (`iaj/reproduce.py`).
"""

from collections.abc import Iterator, Mapping
import dataclasses
import fnmatch
import math
import os
from pathlib import Path
import tomllib
from typing import Any

from lm_jax.errors import BadInputError, CorruptError, nearest
from lm_jax.run.files import file_digest, read_json
from lm_jax.run.results import InvalidError, parse_result

RESULT_FILE = "result.toml"
SUMMARY_FILE = "summary.json"


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """How a result is measured again.

    Attributes:
      command: command line, in which `{workdir}` stands for the folder that it writes.
      device: machine that it was measured on, in words.
      minutes: minutes that it took there; None where that is not recorded.
      summary: file in the work folder that held what `summary.json` holds here; runs of now may
        call it `summary.json` too.
      parts: entries of that file that are kept here, since it is large; all where none is named.
    """

    command: str
    device: str
    minutes: float | None = None
    summary: str = SUMMARY_FILE
    parts: tuple[str, ...] = ()

    def file(self, workdir: Path) -> Path:
        """The summary of a run in a work folder, by its name of now or by that of `summary`."""
        named = workdir / self.summary
        return named if named.is_file() else workdir / SUMMARY_FILE

    def kept(self, summary: Any) -> Any:
        """What is kept of the content of that file."""
        if not self.parts:
            return summary
        return {name: summary[name] for name in self.parts if name in summary}

    def __post_init__(self) -> None:
        if "{workdir}" not in self.command:
            raise ValueError("reproduce.command has no {workdir}; say where its results go")


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How closely a second run must agree.

    Attributes:
      numbers: shell pattern of the paths of values (`flatten_values`) that it is for.
      absolute: largest difference.
      relative: largest difference as a share of the stored number.
      why: reason for the tolerance, in words.
      compared: whether the values are compared at all; times of another machine are not.
    """

    numbers: str
    why: str
    absolute: float = 0.0
    relative: float = 0.0
    compared: bool = True


@dataclasses.dataclass(frozen=True)
class ResultDescription:
    """`result.toml`.

    Attributes:
      title: what was measured, in one line.
      files: sha256 of each file of the result, by its name.
      reproduce: how it is measured again; None where `not_reproducible` says why it cannot be.
      not_reproducible: reason that no command measures it again; "" where one does.
      tolerance: tolerances; the first whose pattern fits a number holds, and a number that none
        fits must be equal.
      folder: folder of the files, from the root of the checkout; "" where they lie beside
        `result.toml`.
    """

    title: str
    files: dict[str, str]
    reproduce: Reproduction | None = None
    not_reproducible: str = ""
    tolerance: tuple[Tolerance, ...] = ()
    folder: str = ""

    def __post_init__(self) -> None:
        if (self.reproduce is None) == (not self.not_reproducible):
            raise ValueError("give [reproduce] or not_reproducible, one of the two")
        if SUMMARY_FILE not in self.files:
            raise ValueError(f"files has no {SUMMARY_FILE}")


@dataclasses.dataclass(frozen=True)
class StoredResult:
    """One result: its name `<study>/<name>`, its description and the folder of its files."""

    name: str
    description: ResultDescription
    folder: Path

    def summary(self) -> Any:
        """`summary.json`, as `json.loads` gives it.

        Raises:
          CorruptError: the file is missing or no JSON.
        """
        return read_json(self.folder / SUMMARY_FILE)

    def changed_files(self) -> list[str]:
        """Names of files that are missing or differ from the digest in `result.toml`."""
        return [
            name
            for name, digest in self.description.files.items()
            if not (self.folder / name).is_file()
            or file_digest(self.folder / name)["sha256"] != digest
        ]


def list_results(root: str | os.PathLike[str]) -> list[str]:
    """Names of all results in the folder `root`, sorted."""
    return sorted(
        file.parent.relative_to(root).as_posix() for file in Path(root).glob(f"*/*/{RESULT_FILE}")
    )


def load_stored(root: str | os.PathLike[str], name: str) -> StoredResult:
    """Reads the description of a result.

    Args:
      root: the folder `results` of a checkout.
      name: the result's name, `<study>/<name>`.

    Raises:
      BadInputError: there is no such result.
      CorruptError: its `result.toml` is damaged.
    """
    path = Path(root) / name / RESULT_FILE
    known = list_results(root)
    if name not in known:
        raise BadInputError(f"{root} has no result {name!r}{nearest(name, known)}")
    try:
        with path.open("rb") as file:
            description = parse_result(tomllib.load(file), ResultDescription)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, InvalidError) as error:
        raise CorruptError(f"{path}: {error}; restore it from the repository") from error
    folder = Path(root).parent / description.folder if description.folder else path.parent
    return StoredResult(name, description, folder)


def flatten_values(tree: Any, path: str = "") -> Iterator[tuple[str, float | str]]:
    """Every number and text of a JSON tree with its path, such as `rows.3.n`.

    True and false are the texts "true" and "false"; null is no value.
    """
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    elif isinstance(tree, bool):
        yield path, str(tree).lower()
    elif isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, int | float):
        yield path, float(tree)
    for key, value in items:
        yield from flatten_values(value, f"{path}.{key}" if path else str(key))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One value of a stored result beside that of a second run.

    Attributes:
      path: path of the value in the summary.
      stored: value in the repository; None where only the second run has it.
      again: value of the second run; None where only the repository has it.
      tolerance: tolerance that holds for it; None where they must be equal.
    """

    path: str
    stored: float | str | None
    again: float | str | None
    tolerance: Tolerance | None

    @property
    def compared(self) -> bool:
        """Whether the tolerance asks for agreement."""
        return self.tolerance is None or self.tolerance.compared

    @property
    def allowed(self) -> float:
        """Largest difference that is agreement; 0 for texts, which must be equal."""
        if self.tolerance is None or not isinstance(self.stored, float):
            return 0.0
        return max(self.tolerance.absolute, self.tolerance.relative * abs(self.stored))

    @property
    def agrees(self) -> bool:
        """Whether both runs have the value and differ by no more than `allowed`."""
        if not self.compared:
            return True
        if not (isinstance(self.stored, float) and isinstance(self.again, float)):
            return self.stored is not None and self.stored == self.again
        both_nan = math.isnan(self.stored) and math.isnan(self.again)
        return (
            both_nan or self.stored == self.again or abs(self.stored - self.again) <= self.allowed
        )


def compare_summaries(
    stored: Any, again: Any, tolerances: tuple[Tolerance, ...]
) -> list[Comparison]:
    """Every value of two summaries side by side, in the order of the stored one.

    Args:
      stored: summary in the repository, as JSON.
      again: summary of the second run, as JSON.
      tolerances: tolerances in order of precedence.
    """
    first, second = dict(flatten_values(stored)), dict(flatten_values(again))
    return [
        Comparison(
            path,
            first.get(path),
            second.get(path),
            next((each for each in tolerances if fnmatch.fnmatchcase(path, each.numbers)), None),
        )
        for path in dict.fromkeys((*first, *second))
    ]

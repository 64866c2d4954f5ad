"""Words and frame of needles for another language, or for code, from a file of the user.

Plain text has one word a line, or several between spaces. A .json file is an object:

    {"words": ["Apfel", "Tisch", ...], "cue": "Das geheime Wort ist", "end": ".", "lines": false}

where all but the words may be left out. The needle is the cue, a space, a word and the end; the
prompt ends with the cue. With `lines` the distractors are lines of the haystack, as of code.
"""

import dataclasses
from pathlib import Path

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.results import load_result
from lm_jax.text.lines import read_text
from polyattn_jax.suites.niah import CUE


@dataclasses.dataclass(frozen=True)
class NeedleFile:
    """Words of needles and the frame they stand in; `niah` takes the fields by these names."""

    words: tuple[str, ...]
    cue: str = CUE
    end: str = "."
    lines: bool = False


def read_needles(path: str | Path) -> NeedleFile:
    """Reads a file of words.

    Raises:
      BadInputError: it cannot be read, or has no words or an empty cue.
    """
    path = Path(path)
    if path.suffix == ".json":
        try:
            found = load_result(path, NeedleFile)
        except CorruptError as error:
            raise BadInputError(f"{path}: {error}") from error
    else:
        found = NeedleFile(tuple(read_text(path).split()))
    if not found.words:
        raise BadInputError(f"{path} has no words; write one a line")
    if found.cue != found.cue.strip() or not found.cue:
        raise BadInputError(f"{path}: cue = {found.cue!r} must be a text without space at its ends")
    return found

"""What can be refused before JAX is imported: missing models, assets and files, a folder in use.

`inputs.json` beside the stored help says which flags of a study name what (`run.settings.Reads`),
and what they are by default; `tools/store_help.py` writes it. A run that has begun is left to the
study, which shows what has finished though its inputs are gone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import json
from pathlib import Path
import re
from typing import Any

from iaj import commands
from lm_jax import assets
from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.run.files import read_json
from lm_jax.run.workdir import CONFIG_FILE, FINISHED_FILE, check_free
from lm_jax.text.gguf_reader import contents, open_gguf

INPUTS_FILE = "inputs.json"
_MODEL_CONFIG = "config.json"
_HUB_NAME = re.compile(r"([\w.-]+)/([\w.-]+)(@.+)?")


def check(words: tuple[str, ...], argv: Sequence[str]) -> None:
    """Refuses what a study would refuse later.

    Args:
      words: words of the command.
      argv: arguments after them.

    Raises:
      WorkdirInUseError: another process holds the work folder.
      BadInputError: a model, an asset or a file is not there.
      UsageError: a length is beyond the positions of the model.
    """
    tables = json.loads((commands.help_file(words).parent / INPUTS_FILE).read_text("utf-8"))
    table = tables.get(" ".join(words))
    if table is None:
        return
    given = _given(argv)
    folder = given.get("workdir", [""])[-1]
    # Others of several processes share the folder with the one that holds it.
    if folder and "coordinator" not in given:
        check_free(folder)
    if _has_begun(folder):
        return
    missing: dict[str, None] = {}
    lengths, models = [], []
    for field in table["reads"]:
        for flag, value in _values(field, table, given):
            if field["kind"] == "model":
                models.append((flag, value))
            if field["kind"] == "length":
                lengths.append((flag, value))
            elif (needed := _assets_of(field, value)) is not None:
                missing |= dict.fromkeys(name for name in needed if assets.cached(name) is None)
            elif value.endswith(field["suffix"]):
                _check_place(field["kind"], flag, value, download="download" in given)
    if missing:
        be = "asset {} is" if len(missing) == 1 else "assets {} are"
        raise BadInputError(
            f"{be.format(_listed(missing))} not in the cache; run: iaj fetch {' '.join(missing)}"
        )
    if models:
        _check_lengths(lengths, *models[0])


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _given(argv: Sequence[str]) -> dict[str, list[str]]:
    """Values of the flags of a command line, by name."""
    given: dict[str, list[str]] = {}
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            given.setdefault(name, []).append(value if equals else following)
    return given


def _has_begun(folder: str) -> bool:
    if folder:
        return (Path(folder).expanduser() / CONFIG_FILE).exists()
    # Some studies choose their folder below this one.
    return any(Path("runs").glob(f"*/*/{FINISHED_FILE}"))


def _values(
    field: Mapping[str, Any], table: Mapping[str, Any], given: Mapping[str, list[str]]
) -> Iterator[tuple[str, str]]:
    """The flag and each of the values of a field; nothing of a config file that is not known."""
    if given.keys() & set(field["unless"]):
        return
    for flag in field["flags"]:
        texts = given.get(flag, [])
        # Of a flag with one value that is given again, the last one counts.
        for text in texts if field["many"] else texts[-1:]:
            # Whatever else Python may write is for the study to read.
            if not text.startswith(("(", "[")):
                parts = text.split(",") if field["many"] else [text]
                yield from ((flag, part) for part in parts if part)
    config = given.get("config", [table["config"]])[-1]
    if not given.keys() & {*field["flags"], *table["shortcuts"]}:
        yield from ((field["flags"][0], value) for value in field["values"].get(config, ()))


def _assets_of(field: Mapping[str, Any], value: str) -> Sequence[str] | None:
    """The entries of the manifest that a value needs; None where it is no name."""
    if field["kind"] != "model":
        return field["assets"].get(value)
    return [value] if value in assets.models() and not Path(value).exists() else None


def _check_place(kind: str, flag: str, value: str, *, download: bool) -> None:
    # A published model, or a part of one, is found by the study.
    named = value.partition("/")[0] in published.names()
    if kind == "name" or named or Path(value).expanduser().exists():
        return
    if kind == "run":
        raise BadInputError(
            f"--{flag}={value}: there is no such folder; name that of a pretraining run, or a "
            f"published model{nearest(value, published.names())}"
        )
    if kind == "file":
        raise BadInputError(f"--{flag}={value}: there is no such file; check the path")
    if not download and not _in_hub_cache(value):
        raise BadInputError(
            f"--{flag}={value}: there is no such folder or .gguf file, no model of that name in "
            f"the hub's cache, and none in the manifest"
            f"{nearest(value, [*assets.models(), *published.names()])}"
        )


def _check_lengths(lengths: Iterable[tuple[str, str]], model_flag: str, model: str) -> None:
    most = _positions(model)
    for flag, value in lengths:
        if most is not None and value.isdecimal() and int(value) > most:
            raise UsageError(
                f"--{flag}={value} is longer than the {most:,} positions of "
                f"--{model_flag}={model}; give at most {most}"
            )


def _positions(model: str) -> int | None:
    """Positions of a model by its config.json or .gguf file; None where they stand elsewhere."""
    path, known = Path(model).expanduser(), assets.models()
    if not path.exists() and model in known:
        path = assets.path(model, known[model])
    if path.suffix == ".gguf" and path.is_file():
        told = open_gguf(path).fields
        found = next((told[name] for name in told if name.endswith(".context_length")), None)
        return None if found is None else int(contents(found))
    if not (path / _MODEL_CONFIG).is_file():
        return None
    config = read_json(path / _MODEL_CONFIG)
    most = config.get("max_position_embeddings", config.get("n_positions"))
    return most if isinstance(most, int) else None


def _in_hub_cache(value: str) -> bool:
    parts = _HUB_NAME.fullmatch(value)
    if parts is None:
        return False
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{parts[1]}--{parts[2]}").is_dir()

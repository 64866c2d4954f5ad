"""Config files, which are Python, and the flags that override their fields.

`polyattn/smollm2` names a config that comes with the packages, and works in any folder; what ends
in `.py` is the path of a file. Either may be followed by `:mode`.

A config file runs when it is loaded: name only files you trust, never one out of a downloaded
model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib.machinery
from pathlib import Path
import types
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict, config_flags

from lm_jax.errors import UsageError, UserError, nearest

Settings = TypeVar("Settings")
SHIPPED = "configs"


def in_mode(
    mode: str,
    config: Settings,
    modes: Mapping[str, Callable[[Settings], Settings]],
    *,
    of: str,
) -> config_dict.ConfigDict:
    """The ConfigDict that a `get_config(mode)` returns.

    Args:
      mode: name of the mode, or "" for `config` as it is.
      config: a dataclass.
      modes: functions from `config` to the config of a mode, by the name of the mode.
      of: what the modes belong to, for errors, as in "a search".

    Raises:
      UsageError: for an unknown mode.
    """
    if mode and mode not in modes:
        raise UsageError(f"mode {mode!r} is not one of {of}{nearest(mode, modes)}")
    chosen: Any = modes[mode](config) if mode else config
    return config_dict.ConfigDict(dataclasses.asdict(chosen))


def override(config: config_dict.ConfigDict | None, argv: Sequence[str]) -> list[str]:
    """Applies `--config.a.b=value` to `config` in place and returns the arguments left over."""
    overrides = flags.FlagValues()
    overrides.set_gnu_getopt(True)
    if config is not None:
        for argument in argv[1:]:
            if name := _overridden(argument):
                _check_field(config, name)
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=overrides, sys_argv=list(argv)
        )
    return overrides(argv)


def overridden(argv: Sequence[str]) -> set[str]:
    """The names of the fields that `--config.FIELD` sets, of sections that of the section."""
    names = {_overridden(argument) for argument in argv}
    return {name.partition("[")[0].partition(".")[0] for name in names if name}


def _overridden(argument: str) -> str | None:
    name = argument.lstrip("-").partition("=")[0].removeprefix("no")
    is_one = argument.startswith("-") and name.startswith("config.")
    return name.removeprefix("config.") if is_one else None


def _check_field(config: config_dict.ConfigDict, path: str) -> None:
    """Checks that a field exists; the error of ml_collections would span 54 lines."""
    node: Any = config
    # An index, as in `widths[0]`, ends the walk; ml_collections checks it.
    for name in path.partition("[")[0].split("."):
        known_here = _items(node) if isinstance(node, config_dict.ConfigDict) else {}
        if name not in known_here:
            known = [field for field, _ in fields(config)]
            raise UsageError(f"--config.{path} is not a field{nearest(path, known)}")
        node = known_here[name]
    if node is None or (isinstance(node, list) and "[" not in path):
        raise UsageError(
            f"--config.{path} cannot be set here, as its type in the config file is "
            f"{type(node).__name__}; make it a tuple or a config_dict.placeholder(type) there"
        )


def _items(section: config_dict.ConfigDict) -> dict[str, Any]:
    # A reference is left as it is: reading one that is required and not yet set would raise.
    return dict(section.items(preserve_field_references=True))


def fields(config: config_dict.ConfigDict) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every field."""
    for key, value in _items(config).items():
        if isinstance(value, config_dict.ConfigDict):
            yield from ((f"{key}.{name}", leaf) for name, leaf in fields(value))
        else:
            yield key, value


def shipped_folder() -> Path:
    """The folder of the configs that come with the packages.

    A wheel holds them inside `lm_jax`, a checkout beside it.
    """
    package = Path(__file__).parents[1]
    inside = package / SHIPPED
    return inside if inside.is_dir() else package.parent / SHIPPED


def shipped_names() -> list[str]:
    """The names of these configs: `polyattn/smollm2`."""
    folder = shipped_folder()
    files = sorted(folder.rglob("*.py"))
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def find_config(name: str) -> Path:
    """The file of a config, by its name or its path.

    Raises:
      UsageError: there is none; names the nearest.
    """
    path = Path(name)
    if path.suffix == ".py":
        if path.is_file():
            return path
        siblings = [str(sibling) for sibling in path.parent.glob("*.py")]
        stem = path.with_suffix("").as_posix().removeprefix(f"{SHIPPED}/")
        hint = nearest(name, siblings) if siblings else nearest(stem, shipped_names())
        raise UsageError(f"--config={name}: there is no such file{hint}")
    # Only one of these names: nothing like `../x` leads out of the folder.
    if name not in (known := shipped_names()):
        raise UsageError(
            f"--config={name}: no config of this name comes with the packages, and a path ends in "
            f".py{nearest(name, known)}"
        )
    return shipped_folder() / f"{name}.py"


def load_config(spec: str) -> config_dict.ConfigDict:
    """Returns `get_config()` of a config, or `get_config(mode)` for `name:mode`, locked.

    Raises:
      UsageError: no such config, no `get_config`, an exception inside it, or no ConfigDict
        returned.
    """
    name, _, mode = spec.partition(":")
    path = find_config(name)
    loader = importlib.machinery.SourceFileLoader(f"config_{path.stem}", str(path))
    module = types.ModuleType(loader.name)
    try:
        loader.exec_module(module)
        config = module.get_config(*([mode] if mode else []))
    except UserError:
        raise
    except Exception as error:
        raise UsageError(
            f"--config={spec}: {type(error).__name__}: {error}; mend the file or its mode"
        ) from error
    if not isinstance(config, config_dict.ConfigDict):
        kind = type(config).__name__
        raise UsageError(f"--config={spec}: get_config gave a {kind}; return a ConfigDict")
    return config.lock()

"""What a study declares of itself."""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import importlib
import types
import typing
from typing import Any, cast

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from lm_jax.console.config_files import in_mode
from lm_jax.run.settings import Settings
from lm_jax.train.config import MAY_CHANGE

_SCALARS = (bool, int, float, str)


class Training(Settings):
    """Base of the settings of a study that trains: its command can trace steps (`--profile`)."""


class Distributed(Settings):
    """Base of the settings of a study that several processes can share (`--coordinator`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A study; its functions are named as `module:function` of its package, loaded when needed.

    Most have the names that are the defaults.

    Attributes:
      command: words after `iaj`; `configs/LIBRARY/NAME.py` of the same words is its default config.
      config: frozen dataclass of the settings; also of `Training` or `Distributed` where it is one.
      modes: functions from settings to settings, by the name that `--config=NAME:mode` takes;
        "smoke" is the study in seconds.
      summary: dataclass of `summary.json`, or a union of several.
      inputs: `(config) -> Inputs`, what the numbers depend on besides the settings: identities of
        models and digests of files (`lm_jax.run.finished`). It refuses bad input, and is called
        before the work folder is made; what it loads for that it may hand on as `Opened`. None
        where the settings decide everything.
      run: `(config, work) -> summary`, which measures. A run that was stopped is called again.
      report: `(config, summary, folder) -> lm_jax.report.Report`, from the files of the work folder
        alone.
    """

    command: str
    config: type
    modes: Mapping[str, Callable[[Any], Any]]
    summary: type | types.UnionType
    inputs: str | None = "run:inputs"
    run: str = "run:measure"
    report: str = "report:build"

    @property
    def config_name(self) -> str:
        """The name of the default config: `sparse/two_hop`."""
        return self.command.replace(" ", "/")

    @property
    def may_change(self) -> Collection[str]:
        """Fields that may differ when a training is resumed; numbers depend on them by rounding."""
        return MAY_CHANGE if issubclass(self.config, Training) else ()

    def settings(self, mode: str = "", **changed: Any) -> ConfigDict:
        """What `get_config(mode)` of a config file returns.

        Args:
          mode: one of `modes`, or "" for none.
          **changed: fields of the settings that differ from their defaults.

        Raises:
          UsageError: the mode is unknown, or the settings are refused.
        """
        chosen = in_mode(mode, self.config(**changed), self.modes, of=f"iaj {self.command}")
        # A field that may be None can be set on the command line only where its type is known.
        for name, kind in typing.get_type_hints(self.config).items():
            kinds = [one for one in typing.get_args(kind) if one is not type(None)]
            if chosen.get(name, 0) is None and len(kinds) == 1 and kinds[0] in _SCALARS:
                chosen[name] = placeholder(kinds[0])
        return chosen

    def function(self, name: str) -> Callable[..., Any]:
        """The function of one of the fields `inputs`, `run` and `report`.

        Raises:
          AttributeError: the module has no such function.
        """
        module, _, function = cast(str, getattr(self, name)).partition(":")
        # The settings are in `settings.py` of the study's package.
        package = self.config.__module__.rpartition(".")[0]
        return getattr(importlib.import_module(f"{package}.{module}"), function)

"""Modules under the names that they had in earlier versions.

    keep_names("protot_jax", {"studies": "interventions robustness", "mixers": "edits"})

makes `import protot_jax.interventions` import `protot_jax.studies.interventions`, and
`protot_jax.interventions.effects` what is in it, as one module with two names and with a
`DeprecationWarning`.
"""

from collections.abc import Mapping, Sequence
import importlib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
import importlib.util
import sys
from types import CodeType, ModuleType
import warnings


def keep_names(
    package: str, rooms: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> None:
    """Keeps the earlier names of moved modules.

    Args:
      package: the library.
      rooms: names of modules or packages that were in the library, or in a package of it, as
        `graphs.prompts`, by the package of it that they are in now.
      renamed: now names of modules that have another name, by the earlier one.
    """
    names = {name: f"{room}.{name}" for room, given in rooms.items() for name in given.split()}
    names |= renamed or {}
    table = {f"{package}.{old}": f"{package}.{new}" for old, new in names.items()}
    # Before the finder of files, which would make a second module of what is in a moved package.
    sys.meta_path.insert(0, _Moved(table))


class _Moved(MetaPathFinder, Loader):
    """Finds a module by its earlier name, and loads the one that it is now."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def now(self, name: str) -> str | None:
        """The name of a module now; None for one that was not moved."""
        for old in (name, name.rpartition(".")[0]):
            if old in self.names:
                return self.names[old] + name.removeprefix(old)
        return None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        now = self.now(fullname)
        found = importlib.util.find_spec(now) if now else None
        if now is None or found is None:
            return None
        warnings.warn(f"{fullname} is {now} now", DeprecationWarning, stacklevel=2)
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, is_package=is_package, loader_state=now)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        # Importing by the earlier name would put that in its place.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            module.__spec__ = spec.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of a module that `python -m` runs.

        Raises:
          ImportError: it is no module, or no command any more and would do nothing.
        """
        now = self.now(fullname)
        spec = importlib.util.find_spec(now) if now else None
        if spec is None or now is None:
            raise ImportError(f"{fullname} is no module of an earlier version", name=fullname)
        code = spec.loader.get_code(now)  # pyrefly: ignore
        # Of `if __name__ == "__main__"`.
        if "__main__" not in code.co_consts:
            raise ImportError(f"{fullname} is no command; `iaj --help` lists all", name=fullname)
        return code

"""Who may import whom: kernels <- lm_jax <- the three libraries <- iaj, configs <- tools, tests.

Inside lm_jax the packages have an order too (`PACKAGE_MAY_IMPORT`), and no two modules anywhere
import each other, directly or around a corner. The imports are read from the source (`ast`), those
inside functions as well, so no module is run. `import_module("name")` counts.

Besides, a run is finished by the frame of studies alone, settings are the one language of options,
and no folder of the source is so full that nobody reads its list (`house_violations`, `crowded`).
"""

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
import graphlib
from pathlib import Path
import sys
from typing import NamedTuple

import pytest

from iaj import commands as front

ROOT = Path(__file__).parent.parent
LIBRARIES = {"protot_jax", "sparse_jax", "polyattn_jax"}
HOUSE = {"iaj_kernels", "lm_jax", *LIBRARIES, "iaj", "configs", "tools", "tests"}

# Folder -> the folders of the house that it may import besides itself.
MAY_IMPORT = {
    "iaj_kernels": set(),
    "lm_jax": {"iaj_kernels"},
    **{library: {"iaj_kernels", "lm_jax"} for library in LIBRARIES},
    "iaj": {"iaj_kernels", "lm_jax", *LIBRARIES},
    "configs": {"iaj_kernels", "lm_jax", *LIBRARIES},
    "tools": HOUSE - {"tests"},
    "tests": HOUSE,
}
# The same inside lm_jax, for its packages and the modules beside them.
PACKAGE_MAY_IMPORT = {
    "errors": set(),
    "statistics": {"errors", "run"},
    "model": {"errors"},
    "run": {"errors"},
    "report": {"errors", "statistics"},
    "parallel": {"errors", "model"},
    "assets": {"errors", "run"},
    "text": {"errors", "run", "assets"},
    "checkpoint": {"errors", "run", "model", "parallel"},
    "inspect": {"errors", "model", "text"},
    "weights": {"errors", "run", "model", "parallel", "assets", "text", "checkpoint", "inspect"},
}
PACKAGE_MAY_IMPORT["train"] = {*PACKAGE_MAY_IMPORT["weights"], "weights"}
PACKAGE_MAY_IMPORT["evaluate"] = {*PACKAGE_MAY_IMPORT["train"], "train", "statistics"}
# The rooms of each library, from the bottom up: a room imports itself and those before it.
ROOMS = {
    "polyattn_jax": ("recipes", "suites", "audit", "report", "studies"),
    "protot_jax": ("mixers", "training", "analysis", "studies"),
    "sparse_jax": ("gates", "torch_gates", "circuits", "transcoders", "graphs", "studies"),
}
PACKAGE_MAY_IMPORT["console"] = {"errors", "run"}
PACKAGE_MAY_IMPORT["study"] = {"errors", "run", "console", "report", "statistics", "train"}
# The front end of commands: it traces training steps, and only commands and tests import it.
CLI = "lm_jax.console.cli"
CLI_MAY_IMPORT = {"errors", "run", "console", "train"}
# Runs every study as a command.
STUDY_COMMAND = "lm_jax/study/command.py"
KERNELS_MAY_IMPORT = {"jax", "jax_triton", "numpy", "triton", *sys.stdlib_module_names}
# jax_triton raises on import where there is no GPU; the others are slow and may be absent.
ONLY_IN_FUNCTIONS = {
    *(
        "datasets",
        "jax_triton",
        "lm_eval",
        "optuna",
        "torch",
        "trackio",
        "transformers",
        "vl_convert",
        "wandb",
    ),
}
TORCH_FOLDERS = ("lm_jax/weights/", "sparse_jax/torch_gates/", "tools/", "tests/")
# Workers run in environments of their own, without this repository.
TRANSFORMERS_FILES = ("lm_jax/weights/compat.py", "tools/bench/workers/", "tests/")


class Import(NamedTuple):
    """`name` is the full dotted module; `deferred` tells an import inside a function.

    `member` is `module.name` for one name out of `from module import name`, which may be a module.
    """

    name: str
    line: int
    deferred: bool
    member: str | None = None


def imported_as(path: str) -> str:
    """The file `path` below the folder that is on the path of Python."""
    return path.removeprefix("kernels/")


def folder_of(package: str) -> Path:
    """Where the modules of `package` lie."""
    return ROOT / ("kernels/iaj_kernels" if package == "iaj_kernels" else package)


def imports(source: str, path: str) -> Iterator[Import]:
    """The modules that `source` imports, relative ones resolved against `path`."""
    package = imported_as(path).split("/")[:-1]

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    for alias in child.names:
                        yield Import(alias.name, child.lineno, deferred)
                case ast.ImportFrom():
                    base = package[: len(package) - child.level + 1] if child.level else []
                    name = ".".join([*base, *([child.module] if child.module else [])])
                    for alias in child.names:
                        yield Import(name, child.lineno, deferred, f"{name}.{alias.name}")
                case ast.Call(
                    func=ast.Name(id="import_module" | "__import__")
                    | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    yield Import(name, child.lineno, deferred)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, deferred or inside)

    yield from walk(ast.parse(source), False)


def module_of(path: str) -> str:
    """The dotted name of the file `path`."""
    parts = imported_as(path).removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolved(name: str, modules: Collection[str]) -> str:
    """The longest prefix of `name`, as `from a import b` gives `a.b`, that is a module."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules among `sources` (path -> source) that it imports."""
    modules = {module_of(path) for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        named = {resolved(each.member or each.name, modules) for each in imports(source, path)}
        graph[module_of(path)] = (named & modules) - {module_of(path)}
    return graph


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one import cycle, in order; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def package_violations(source: str, path: str, modules: Collection[str]) -> list[str]:
    """One line for each import in a file of lm_jax that goes against the order of its packages."""
    module = module_of(path)
    package = module.split(".")[1] if "." in module else None
    if package is None:
        return []
    allowed = CLI_MAY_IMPORT if module == CLI else PACKAGE_MAY_IMPORT[package] | {package}
    results = []
    for each in imports(source, path):
        name = resolved(each.member or each.name, modules)
        if name.startswith("lm_jax.") and name.split(".")[1] not in allowed:
            results.append(f"{path}:{each.line}: {name}: lm_jax.{package} may not import it")
        if name == CLI and path != STUDY_COMMAND:
            results.append(f"{path}:{each.line}: {name}: only commands import it")
    return results


def violations(source: str, path: str) -> list[str]:
    """One line for each import in the file `path` (relative to the root) that breaks the rule."""
    folder = imported_as(path).split("/")[0]
    results = []
    # One line of `from a import b, c` counts once.
    for name, line, deferred in dict.fromkeys(each[:3] for each in imports(source, path)):
        top = name.split(".")[0]
        where = f"{path}:{line}: {name}"
        if top in HOUSE - {folder} - MAY_IMPORT[folder]:
            results.append(f"{where}: {folder} may not import {top}")
        if folder == "iaj_kernels" and top not in KERNELS_MAY_IMPORT | HOUSE:
            results.append(f"{where}: kernels imports only jax and numpy")
        if top in ONLY_IN_FUNCTIONS and not deferred:
            results.append(f"{where}: only inside a function")
        if top == "torch" and not path.startswith(TORCH_FOLDERS):
            results.append(f"{where}: only in {', '.join(TORCH_FOLDERS)}")
        if top == "transformers" and not path.startswith(TRANSFORMERS_FILES):
            results.append(f"{where}: call lm_jax.weights.compat.transformers() instead")
    return results


@pytest.mark.parametrize("folder", sorted(HOUSE))
def test_the_house_keeps_the_import_rule(folder):
    files = sorted(folder_of(folder).rglob("*.py"))
    assert files, f"{folder} holds no Python file"
    results = []
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        results += violations(file.read_text("utf-8"), path)
    assert not results, "\n".join(results)


def sources() -> dict[str, str]:
    """Path -> source of every module outside tests."""
    return {
        file.relative_to(ROOT).as_posix(): file.read_text("utf-8")
        for folder in sorted(HOUSE - {"tests"})
        for file in sorted(folder_of(folder).rglob("*.py"))
    }


def test_no_two_modules_import_each_other():
    assert not cycle(import_graph(sources()))


def test_the_packages_of_lm_jax_keep_their_order():
    held = sources()
    modules = {module_of(path) for path in held}
    assert {name.split(".")[1] for name in modules if name.startswith("lm_jax.")} == set(
        PACKAGE_MAY_IMPORT
    )
    results = [
        line
        for path, source in held.items()
        if path.startswith("lm_jax/")
        for line in package_violations(source, path, modules)
    ]
    assert not results, "\n".join(results)


def upward(graph: Mapping[str, set[str]]) -> list[str]:
    """One line for each import that goes from a room of a library to one above it."""
    results = []
    for module, imported in sorted(graph.items()):
        library, *inner = module.split(".")
        if library not in ROOMS or not inner:
            continue
        order = ROOMS[library]
        for name in sorted(imported):
            other = name.split(".")
            if other[0] == library and (
                len(other) == 1 or order.index(other[1]) > order.index(inner[0])
            ):
                results.append(f"{module} imports {name}, which is above it")
    return results


def test_a_library_is_rooms_and_nothing_beside_them():
    modules = {module_of(path) for path in sources()}
    for library, rooms in ROOMS.items():
        held = {name.split(".")[1] for name in modules if name.startswith(f"{library}.")}
        assert held == set(rooms)


def test_no_room_imports_one_above_it():
    assert not upward(import_graph(sources()))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sparse_jax/gates/a", "from sparse_jax.graphs.b import x"),
        ("protot_jax/training/a", "def f():\n    import protot_jax.analysis.b"),
        ("polyattn_jax/recipes/a", "import polyattn_jax"),
    ],
)
def test_a_made_import_of_a_room_above_is_found(module, source):
    made = {
        f"{module}.py": source,
        "sparse_jax/graphs/b.py": "",
        "protot_jax/analysis/b.py": "",
        "polyattn_jax/__init__.py": "",
    }
    assert len(upward(import_graph(made))) == 1


def test_the_command_line_is_imported_by_commands_alone():
    graph, held = import_graph(sources()), sources()
    users = {path for path in held if CLI in graph[module_of(path)]}
    assert users
    mains = {path for path in users if '__name__ == "__main__"' in held[path]}
    assert users - mains == {STUDY_COMMAND}


# A flag, a number and a sentence are each found with one guess. Other modules of a study hold its
# methods, where nothing else uses them.
STUDY_FILES = {"__init__.py", "settings.py", "run.py", "numbers.py", "results.py", "report.py"}
OTHER_NAMES = {
    "__main__.py",
    "config.py",
    "study.py",
    "summary.py",
    "analysis.py",
    "report_data.py",
}


def test_a_study_has_its_six_files_and_no_other_names_for_them():
    studies = [name for name in front.COMMANDS.values() if front.is_study(name)]
    assert studies
    for name in studies:
        held = {file.name for file in ROOT.joinpath(*name.split(".")).glob("*.py")}
        assert held >= STUDY_FILES, name
        assert not held & OTHER_NAMES, name


# Finishes a run: the frame does it, so that no command has a marker without summary and page.
FINISHER = "mark_finished"
FRAME = "lm_jax/study/frame.py"
# Flags are declared at the fields of settings, and one package makes them.
FLAG_MAKERS = "DEFINE_"
FLAGS = "lm_jax/console/"
# Front ends without settings, of which none is a command of a library.
ARGPARSE_FOLDERS = {"iaj", "tools"}
MOST_MODULES = 20


def uses(source: str) -> Iterator[tuple[str, int]]:
    """The names that `source` reads or imports, with their lines; not those that it defines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=str(name)) | ast.Attribute(attr=str(name)):
                yield name, node.lineno
            case ast.ImportFrom():
                for alias in node.names:
                    yield alias.name, node.lineno


def house_violations(source: str, path: str) -> list[str]:
    """One line for each name or import that finishes a run or makes a flag where none should."""
    results = []
    for name, line in uses(source):
        where = f"{path}:{line}: {name}"
        if name == FINISHER and path != FRAME:
            results.append(f"{where}: only {FRAME} finishes a run; declare a study")
        if name.startswith(FLAG_MAKERS) and not path.startswith(FLAGS):
            results.append(f"{where}: only {FLAGS} makes flags; use Flag() at a field of settings")
    for each in imports(source, path):
        if each.name.split(".")[0] == "argparse" and path.split("/")[0] not in ARGPARSE_FOLDERS:
            results.append(f"{path}:{each.line}: argparse: only in iaj and tools; use settings")
    return results


def crowded(paths: Iterable[str]) -> list[str]:
    """One line for each folder with more than `MOST_MODULES` modules beside its `__init__.py`."""
    files = map(Path, paths)
    counts = Counter(file.parent.as_posix() for file in files if file.name != "__init__.py")
    return [
        f"{folder} has {count} modules; make a package of some"
        for folder, count in sorted(counts.items())
        if count > MOST_MODULES
    ]


def test_only_the_frame_finishes_a_run_and_only_settings_make_flags():
    held = sources()
    named = {path for path, source in held.items() if FINISHER in dict(uses(source))}
    assert named == {FRAME}
    results = [line for path, source in held.items() for line in house_violations(source, path)]
    assert not results, "\n".join(results)


def test_no_folder_of_the_source_is_crowded():
    source = HOUSE - {"tests", "configs"}
    results = crowded(path for path in sources() if imported_as(path).split("/")[0] in source)
    assert not results, "\n".join(results)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        (
            "protot_jax/studies/a.py",
            "def f(run):\n    run.finished.mark_finished(run, {})",
            "finishes",
        ),
        ("tools/a.py", "from lm_jax.run.finished import mark_finished as done", "finishes"),
        ("sparse_jax/a.py", "def f():\n    import argparse", "argparse: only in iaj and tools"),
        ("lm_jax/console/a.py", "from argparse import Namespace", "argparse: only in iaj"),
        ("iaj/a.py", "from absl import flags\nflags.DEFINE_string('a', None, '')", "makes flags"),
        ("lm_jax/study/a.py", "from absl.flags import DEFINE_bool", "makes flags"),
    ],
)
def test_a_made_finisher_or_flag_is_found(path, source, complaint):
    (result,) = house_violations(source, path)
    assert result.startswith(path) and complaint in result


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (FRAME, "from lm_jax.run.finished import mark_finished\nmark_finished(path, {})"),
        ("lm_jax/run/finished.py", "def mark_finished(folder, inputs):\n    pass"),
        ("lm_jax/console/flags.py", "flags.DEFINE_string(name, None, '', values)"),
        ("tools/a.py", "import argparse"),
        ("iaj/a.py", "from argparse import Namespace"),
    ],
)
def test_the_frame_and_the_makers_of_flags_pass(path, source):
    assert house_violations(source, path) == []


def test_a_made_crowd_is_found():
    full = [f"lm_jax/model/m{i}.py" for i in range(MOST_MODULES)] + ["lm_jax/model/__init__.py"]
    # A package inside is a folder of its own.
    assert not crowded([*full, "lm_jax/model/inner/a.py"])
    assert crowded([*full, "lm_jax/model/one_more.py"]) == [
        f"lm_jax/model has {MOST_MODULES + 1} modules; make a package of some"
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from lm_jax.model import b", "from lm_jax.model.a import x"),
        ("def f():\n    import lm_jax.model.b", "import lm_jax.model.a as a"),
        ("import lm_jax.model.b", "import importlib as i; i.import_module('lm_jax.model.a')"),
    ],
)
def test_a_made_cycle_is_found(first, second):
    made = {"lm_jax/model/a.py": first, "lm_jax/model/b.py": second, "lm_jax/c.py": first}
    assert set(cycle(import_graph(made))) == {"lm_jax.model.a", "lm_jax.model.b"}


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("lm_jax/model/a.py", "from lm_jax.run import files", "lm_jax.model may not import it"),
        ("lm_jax/model/a.py", "def f():\n    import lm_jax.console.cli", "only commands import it"),
        ("lm_jax/checkpoint/a.py", "from lm_jax.train.state import X", "checkpoint may not"),
        ("lm_jax/report/a.py", "from lm_jax.run.files import write_text", "report may not"),
        ("lm_jax/run/files.py", "from lm_jax.model import params", "lm_jax.run may not import it"),
    ],
)
def test_a_made_upward_import_is_found(path, source, complaint):
    held = {"lm_jax.run.files", "lm_jax.console.cli", "lm_jax.train.state", "lm_jax.model.params"}
    assert complaint in " ".join(package_violations(source, path, held))


def test_kernels_opens_with_the_standard_library_alone():
    path = "kernels/iaj_kernels/__init__.py"
    names = {each.name.split(".")[0] for each in imports((ROOT / path).read_text("utf-8"), path)}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("kernels/iaj_kernels/a.py", "import scipy", "only jax and numpy"),
        (
            "kernels/iaj_kernels/op/a.py",
            "def f():\n    import lm_jax.model.config",
            "may not import lm_jax",
        ),
        ("lm_jax/a.py", "from polyattn_jax import audit", "may not import polyattn_jax"),
        ("lm_jax/a.py", "import importlib as i; i.import_module('tools.fetch')", "tools"),
        ("sparse_jax/a.py", "def f():\n    from protot_jax.x import y", "protot_jax"),
        ("polyattn_jax/a.py", "from tests.conftest import x", "may not import tests"),
        ("configs/polyattn/a.py", "import tools.fetch", "may not import tools"),
        ("polyattn_jax/a.py", "def f():\n    from iaj import commands", "may not import iaj"),
        ("iaj/a.py", "import tools.fetch", "may not import tools"),
        ("tools/a.py", "import torch", "only inside a function"),
        ("tests/a.py", "class A:\n    import transformers", "only inside a function"),
        ("tests/a.py", "if TYPE_CHECKING:\n    import torch", "only inside a function"),
        ("lm_jax/model/decode.py", "def f():\n    import torch.nn", "only in lm_jax/weights/"),
        (
            "lm_jax/weights/families/llama.py",
            "def f():\n    import transformers",
            "compat.transformers()",
        ),
        ("kernels/iaj_kernels/op/pallas.py", "import jax_triton", "only inside a function"),
    ],
)
def test_a_broken_rule_is_found(path, source, complaint):
    result = violations(source, path)
    assert len(result) == 1
    assert complaint in result[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "kernels/iaj_kernels/op/api.py",
            "from . import reference\nfrom ..dispatch import pick\nimport jax",
        ),
        ("kernels/iaj_kernels/op/pallas.py", "def f():\n    import jax_triton"),
        (
            "lm_jax/weights/a.py",
            "from iaj_kernels import prefix_mean\nasync def f():\n    import torch",
        ),
        ("lm_jax/weights/compat.py", "def transformers():\n    import transformers"),
        ("tests/lm_jax/a.py", "f = lambda: __import__('torch')"),
        ("tools/a.py", "import polyattn_jax, sparse_jax.x, iaj.fetch"),
        ("iaj/a.py", "import polyattn_jax, protot_jax, lm_jax.run, iaj_kernels"),
    ],
)
def test_a_kept_rule_passes(path, source):
    assert violations(source, path) == []

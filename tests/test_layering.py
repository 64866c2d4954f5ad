"""Who may import whom: kernels <- lm_jax <- the three libraries <- configs, tools, tests.

The imports are read from the source (`ast`), so no module is run. `import_module("name")` counts.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
import sys
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LIBRARIES = {"protot_jax", "sparse_jax", "polyattn_jax"}
HOUSE = {"kernels", "lm_jax", *LIBRARIES, "configs", "tools", "tests"}

# Folder -> the folders of the house that it may import besides itself.
MAY_IMPORT = {
    "kernels": set(),
    "lm_jax": {"kernels"},
    **{library: {"kernels", "lm_jax"} for library in LIBRARIES},
    "configs": HOUSE - {"tools", "tests"},
    "tools": HOUSE - {"tests"},
    "tests": HOUSE,
}
KERNELS_MAY_IMPORT = {"jax", "jax_triton", "numpy", *sys.stdlib_module_names}
# jax_triton raises on import where there is no GPU; the others are slow and may be absent.
ONLY_IN_FUNCTIONS = {"datasets", "jax_triton", "lm_eval", "optuna", "torch", "transformers"}
TORCH_FOLDERS = ("lm_jax/hf/", "tools/", "tests/")
TRANSFORMERS_FILES = ("lm_jax/hf/compat.py", "tests/")


class Import(NamedTuple):
    """`name` is the full dotted module; `deferred` tells an import inside a function."""

    name: str
    line: int
    deferred: bool


def imports(source: str, path: str) -> Iterator[Import]:
    """The modules that `source` imports, relative ones resolved against `path`."""
    package = path.split("/")[:-1]

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    for alias in child.names:
                        yield Import(alias.name, child.lineno, deferred)
                case ast.ImportFrom():
                    base = package[: len(package) - child.level + 1] if child.level else []
                    name = ".".join([*base, *([child.module] if child.module else [])])
                    yield Import(name, child.lineno, deferred)
                case ast.Call(
                    func=ast.Name(id="import_module" | "__import__")
                    | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    yield Import(name, child.lineno, deferred)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, deferred or inside)

    yield from walk(ast.parse(source), False)


def violations(source: str, path: str) -> list[str]:
    """One line for each import in the file `path` (relative to the root) that breaks the rule."""
    folder = path.split("/")[0]
    found = []
    for name, line, deferred in imports(source, path):
        top = name.split(".")[0]
        where = f"{path}:{line}: {name}"
        if top in HOUSE - {folder} - MAY_IMPORT[folder]:
            found.append(f"{where}: {folder} may not import {top}")
        if folder == "kernels" and top not in KERNELS_MAY_IMPORT | HOUSE:
            found.append(f"{where}: kernels imports only jax and numpy")
        if top in ONLY_IN_FUNCTIONS and not deferred:
            found.append(f"{where}: only inside a function")
        if top == "torch" and not path.startswith(TORCH_FOLDERS):
            found.append(f"{where}: only in {', '.join(TORCH_FOLDERS)}")
        if top == "transformers" and not path.startswith(TRANSFORMERS_FILES):
            found.append(f"{where}: call lm_jax.hf.compat.transformers() instead")
    return found


@pytest.mark.parametrize("folder", sorted(HOUSE))
def test_the_house_keeps_the_import_rule(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} holds no Python file"
    found = []
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        found += violations(file.read_text("utf-8"), path)
    assert not found, "\n".join(found)


def test_kernels_opens_with_the_standard_library_alone():
    path = "kernels/__init__.py"
    names = {each.name.split(".")[0] for each in imports((ROOT / path).read_text("utf-8"), path)}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("kernels/a.py", "import scipy", "only jax and numpy"),
        ("kernels/op/a.py", "def f():\n    import lm_jax.config", "may not import lm_jax"),
        ("lm_jax/a.py", "from polyattn_jax import audit", "may not import polyattn_jax"),
        ("lm_jax/a.py", "import importlib as i; i.import_module('tools.fetch')", "tools"),
        ("sparse_jax/a.py", "def f():\n    from protot_jax.x import y", "protot_jax"),
        ("polyattn_jax/a.py", "from tests.conftest import x", "may not import tests"),
        ("configs/polyattn/a.py", "import tools.fetch", "may not import tools"),
        ("tools/a.py", "import torch", "only inside a function"),
        ("tests/a.py", "class A:\n    import transformers", "only inside a function"),
        ("tests/a.py", "if TYPE_CHECKING:\n    import torch", "only inside a function"),
        ("lm_jax/decode.py", "def f():\n    import torch.nn", "only in lm_jax/hf/"),
        ("lm_jax/hf/llama.py", "def f():\n    import transformers", "compat.transformers()"),
        ("kernels/op/pallas.py", "import jax_triton", "only inside a function"),
    ],
)
def test_a_broken_rule_is_found(path, source, complaint):
    found = violations(source, path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/op/api.py", "from . import reference\nfrom ..dispatch import pick\nimport jax"),
        ("kernels/op/pallas.py", "def f():\n    import jax_triton"),
        ("lm_jax/hf/a.py", "from kernels import prefix_mean\nasync def f():\n    import torch"),
        ("lm_jax/hf/compat.py", "def transformers():\n    import transformers"),
        ("tests/lm_jax/a.py", "f = lambda: __import__('torch')"),
        ("tools/a.py", "import polyattn_jax, sparse_jax.x"),
    ],
)
def test_a_kept_rule_passes(path, source):
    assert violations(source, path) == []

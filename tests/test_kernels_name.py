"""The kernels are imported as `iaj_kernels`: `kernels` is another package of the index."""

import importlib
import os
from pathlib import Path
import subprocess
import sys
import textwrap

import pytest

import iaj_kernels

ROOT = Path(__file__).parent.parent


def run(source: str, last: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `source` in a new interpreter, which looks in the checkout first and in `last` last."""
    search = os.pathsep.join(map(str, filter(None, (ROOT, ROOT / "kernels", last))))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )


def test_another_package_named_kernels_is_imported_though_the_checkout_comes_first(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("__version__ = '0.18.2'\n")
    source = """
        import kernels
        import iaj_kernels.suites
        print(kernels.__version__, iaj_kernels.suites.__name__)
    """
    assert run(source, last=tmp_path).stdout == "0.18.2 iaj_kernels.suites\n"


def test_the_folder_of_the_checkout_is_no_package_to_transformers():
    source = """
        from lm_jax.weights.compat import transformers
        print(transformers().utils.is_kernels_available())
    """
    assert run(source).stdout == "False\n"


def test_importing_kernels_starts_nothing():
    source = """
        import sys
        before = set(sys.modules)
        import iaj_kernels
        loaded = {name.split(".")[0] for name in set(sys.modules) - before} - {"iaj_kernels"}
        print(loaded <= sys.stdlib_module_names)
    """
    assert run(source).stdout == "True\n"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An operation `toy`, laid out as every operation is, and one that fails on import."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "reference.py").write_text("def double(x):\n    return x + x\n")
    (folder / "api.py").write_text(
        "from iaj_kernels.toy import reference\n\ndef toy(x):\n    return reference.double(x)\n"
    )
    (tmp_path / "broken.py").write_text("raise ImportError('no GPU here')\n")
    exports = {"toy": "iaj_kernels.toy.api", "broken": "iaj_kernels.broken"}
    monkeypatch.setattr(iaj_kernels, "_EXPORTS", {**iaj_kernels._EXPORTS, **exports})
    monkeypatch.setattr(iaj_kernels, "__path__", [*iaj_kernels.__path__, str(tmp_path)])
    yield
    vars(iaj_kernels).pop("toy", None)
    for name in ("iaj_kernels.toy", "iaj_kernels.toy.api", "iaj_kernels.toy.reference"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("toy")
def test_an_operation_loads_when_it_is_first_named():
    assert "iaj_kernels.toy.api" not in sys.modules
    assert "toy" in dir(iaj_kernels)
    assert iaj_kernels.toy(2) == 4
    from iaj_kernels import toy

    assert toy is iaj_kernels.toy


@pytest.mark.usefixtures("toy")
def test_the_public_name_stays_the_function_when_its_folder_is_imported_first():
    reference = importlib.import_module("iaj_kernels.toy.reference")
    assert reference.double(3) == 6
    assert iaj_kernels.toy(3) == 6


@pytest.mark.usefixtures("toy")
def test_an_operation_that_cannot_load_fails_only_where_it_is_used():
    assert iaj_kernels.toy(1) == 2
    with pytest.raises(ImportError, match="no GPU here"):
        iaj_kernels.broken  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_op"):
        iaj_kernels.no_such_op  # noqa: B018
    assert not hasattr(iaj_kernels, "CUDAProperties")

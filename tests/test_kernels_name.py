"""Our folder `kernels` shares its name with a package that `transformers` looks for.

The other package is faked by its metadata alone, which is what `transformers` reads first.
"""

import importlib
import os
from pathlib import Path
import subprocess
import sys
import textwrap

import pytest

import kernels

ROOT = Path(__file__).parent.parent


def run(source: str, *path: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs `source` in a new interpreter that sees `path`, then the root of the checkout."""
    search = os.pathsep.join(map(str, (*path, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=check,
    )


@pytest.fixture
def other_package(tmp_path):
    """A folder whose metadata claims that the other package is installed, in the version range."""
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    return tmp_path


LOAD = """
    import importlib.metadata, sys
    from lm_jax.weights.compat import transformers

    library = transformers()
    config = library.AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )
    assert library.AutoTokenizer
    print(config.model_type, importlib.metadata.version("kernels"))
"""


def test_configs_and_tokenizers_load_beside_the_other_package(other_package):
    assert run(LOAD, other_package).stdout == "llama 0.18.2\n"


BUILD = """
    import torch
    model = library.AutoModelForCausalLM.from_config(config)
    print(model(torch.zeros((1, 3), dtype=torch.long)).logits.shape[-1])
"""


@pytest.mark.torch
def test_a_model_loads_beside_the_other_package(other_package):
    assert run(LOAD + BUILD, other_package).stdout == "llama 0.18.2\n8\n"


@pytest.mark.torch
def test_without_the_switch_no_model_loads(other_package):
    bare = run("from transformers import LlamaForCausalLM", other_package, check=False)
    assert bare.returncode == 1
    assert "from 'kernels'" in bare.stderr


def test_the_probe_is_left_alone_without_the_other_package():
    source = """
        from lm_jax.weights.compat import transformers
        probe = transformers().utils.import_utils.is_kernels_available
        print(probe.__module__, probe())
    """
    assert run(source).stdout == "transformers.utils.import_utils False\n"


def test_importing_kernels_starts_nothing():
    source = """
        import sys
        before = set(sys.modules)
        import kernels
        loaded = {name.split(".")[0] for name in set(sys.modules) - before} - {"kernels"}
        print(loaded <= sys.stdlib_module_names, kernels.__version__)
    """
    assert run(source).stdout == "True 0.0.0\n"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An operation `toy`, laid out as every operation is, and one that fails on import."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "reference.py").write_text("def double(x):\n    return x + x\n")
    (folder / "api.py").write_text(
        "from kernels.toy import reference\n\ndef toy(x):\n    return reference.double(x)\n"
    )
    (tmp_path / "broken.py").write_text("raise ImportError('no GPU here')\n")
    exports = {"toy": "kernels.toy.api", "broken": "kernels.broken"}
    monkeypatch.setattr(kernels, "_EXPORTS", {**kernels._EXPORTS, **exports})
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    yield
    vars(kernels).pop("toy", None)
    for name in ("kernels.toy", "kernels.toy.api", "kernels.toy.reference"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("toy")
def test_an_operation_loads_when_it_is_first_named():
    assert "kernels.toy.api" not in sys.modules
    assert "toy" in dir(kernels)
    assert kernels.toy(2) == 4
    from kernels import toy

    assert toy is kernels.toy


@pytest.mark.usefixtures("toy")
def test_the_public_name_stays_the_function_when_its_folder_is_imported_first():
    reference = importlib.import_module("kernels.toy.reference")
    assert reference.double(3) == 6
    assert kernels.toy(3) == 6


@pytest.mark.usefixtures("toy")
def test_an_operation_that_cannot_load_fails_only_where_it_is_used():
    assert kernels.toy(1) == 2
    with pytest.raises(ImportError, match="no GPU here"):
        kernels.broken  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_op"):
        kernels.no_such_op  # noqa: B018
    assert not hasattr(kernels, "CUDAProperties")

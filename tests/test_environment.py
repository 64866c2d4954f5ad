"""The conditions that conftest promises hold inside a test and in a command that a test starts."""

import importlib.util
import logging
import os
from pathlib import Path
import subprocess
import sys
import textwrap
import tomllib
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.gpu_code import target

PROBE = """
    import jax, jax.numpy as jnp
    assert jax.device_count() == 4
    try:
        jnp.ones(2) + jnp.ones((2, 2))
    except ValueError:
        print("strict")
"""


def test_four_cpu_devices_and_no_silent_rank_promotion():
    assert jax.device_count() == 4
    with pytest.raises(ValueError, match="promot"):
        jnp.ones(2) + jnp.ones((2, 2))


def test_programs_share_a_context_but_not_with_one_that_is_being_lowered():
    """The random bits of a constant are compiled while the program that has it is lowered."""

    @jax.jit
    def shifted(x):
        with jax.ensure_compile_time_eval():
            noise = jax.random.normal(jax.random.key(0), (3, 5))
        return x + noise

    first, second = (jax.jit(lambda x, n=n: x + n).lower(1.0) for n in (1, 2))
    contexts = [each.compiler_ir().context for each in (first, second)]
    assert contexts[0] == contexts[1]
    wanted = np.asarray(jax.random.normal(jax.random.key(0), (3, 5))) + 1.0
    np.testing.assert_array_equal(shifted(jnp.ones((3, 5))), wanted)


def test_a_warning_is_an_error():
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_a_started_command_inherits_the_conditions():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROBE)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "strict\n"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_captured_text_that_is_no_unicode_does_not_stop_a_parallel_run(caplog):
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("a lone \ud800 surrogate")
    assert caplog.messages == ["a lone \ud800 surrogate"]


class Item:
    """A collected test, reduced to its marks and its file."""

    def __init__(self, *marks: pytest.MarkDecorator, file: str = "tests/test_this.py"):
        self.nodeid = f"{file}::test"
        self.marks = [mark.mark for mark in marks]
        self.reasons: list[str] = []

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "skip"
        self.reasons.append(mark.kwargs["reason"])


@pytest.fixture
def reasons(pytestconfig, monkeypatch):
    """Gives conftest's reasons to skip a marked test: all is lacking but one asset."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assets = types.ModuleType("lm_jax.assets")
    assets.cached = lambda name: Path(name) if name == "here" else None
    monkeypatch.setitem(sys.modules, "lm_jax.assets", assets)
    monkeypatch.setattr("lm_jax.assets", assets, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(target, "unsupported_reason", lambda: "needs a compiler")

    def of(*marks: pytest.MarkDecorator) -> list[str]:
        item = Item(*marks)
        conftest.pytest_collection_modifyitems([item])
        return item.reasons

    return of


def test_a_skip_names_its_remedy(reasons):
    assert reasons() == []
    assert reasons(pytest.mark.real("here")) == []
    assert reasons(pytest.mark.real("here", "wiki", "nouns")) == [
        "needs assets: python -m tools.fetch wiki nouns"
    ]
    assert reasons(pytest.mark.torch) == ["needs torch: pip install -r requirements/torch.txt"]
    assert reasons(pytest.mark.compiled) == ["needs a compiler"]
    assert reasons(pytest.mark.triton) == ["needs triton: pip install -r requirements/triton.txt"]


def test_a_real_mark_without_names_is_refused(reasons):
    with pytest.raises(pytest.UsageError, match="name the assets"):
        reasons(pytest.mark.real)


def test_files_that_take_long_come_first_and_the_rest_stay_in_order(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    long = [*tomllib.loads(Path(__file__).with_name("slow_files.toml").read_text("utf-8"))]
    names = ["tests/test_b.py", long[1], "tests/test_a.py", long[0], "tests/test_b.py"]
    items = [Item(file=name) for name in names]
    conftest.pytest_collection_modifyitems(items)
    wanted = [*long[:2], "tests/test_b.py", "tests/test_a.py", "tests/test_b.py"]
    assert [item.nodeid for item in items] == [f"{name}::test" for name in wanted]
    assert all((Path(__file__).parents[1] / name).is_file() for name in long)


def test_the_library_of_prototypes_is_imported_without_what_few_commands_need():
    """scipy.stats alone takes as long as all else of it."""
    code = (
        "import sys, protot_jax; print('scipy.stats' in sys.modules, protot_jax.attribute.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "attribute"]

"""`iaj doctor` reports memory, files and every extra of the distribution correctly."""

from importlib import util
from pathlib import Path
import re
import tomllib

import jax
from packaging.requirements import Requirement
import pytest

from iaj import commands, doctor
from lm_jax import assets
from lm_jax.console.compilation import machine

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))[
    "project"
]
# For those who change the code; and an asset, which the cache has a line for.
NOT_SHOWN = {"dev", "gemma"}


def test_the_extras_are_those_of_the_project_and_what_they_bring():
    declared = PROJECT["optional-dependencies"]
    assert doctor.EXTRAS.keys() == declared.keys() - NOT_SHOWN
    for name, extra in doctor.EXTRAS.items():
        brought = {Requirement(line).name.replace("-", "_") for line in declared[name]}
        # An extra of jax installs the plugin, and lm-eval has another import name.
        plugins = {module for module in extra.modules if module.startswith("jax_cuda")}
        assert plugins == ({f"jax_{name}_plugin"} if "jax" in brought else set())
        assert set(extra.modules) - plugins == brought - {"jax"}


def test_a_command_that_an_extra_is_for_is_one():
    for extra in doctor.EXTRAS.values():
        if match := re.match(r"iaj (\w+) (\w+)", extra.used_by):
            assert match.groups() in commands.COMMANDS


def test_missing_modules_are_named(monkeypatch):
    here = {"optuna"}
    monkeypatch.setattr(util, "find_spec", lambda name: name in here or None)
    states = {name: state for name, state, _ in doctor.extras()}
    assert states["hpo"] == "installed"
    assert states["botorch"] == "missing: botorch, optuna_integration"


def test_devices_and_memory_are_those_of_the_machine():
    *rows, (last, host) = doctor.devices()
    assert last == "host"
    assert [name for name, _ in rows] == [f"device {device.id}" for device in jax.devices()]
    if (info := Path("/proc/meminfo")).is_file():
        (kib,) = re.findall(r"MemTotal:\s+(\d+) kB", info.read_text())
        assert doctor.host_memory() == 1024 * int(kib)
        assert f"{1024 * int(kib) / 1e9:,.1f} GB" in host


def test_a_machine_without_devices_is_no_failure(monkeypatch, capsys):
    def none():
        raise RuntimeError("no supported\ndevices found")

    monkeypatch.setattr(jax, "devices", none)
    assert doctor.main([]) == 0
    assert "none: no supported devices found" in capsys.readouterr().out


def test_the_size_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERPRETABLE_ATTENTION_CACHE", str(tmp_path / "cache"))
    rows = dict(doctor.cache())
    assert rows["cache"] == str(tmp_path / "cache")
    assert rows["not fetched"] == f"{', '.join(assets.entries())}; iaj fetch NAME"
    compiled = tmp_path / "cache" / "compiled" / machine()
    compiled.mkdir(parents=True)
    for name, size in (("a", 1_000_000), ("b", 1_500_000)):
        (compiled / name).write_bytes(bytes(size))
    monkeypatch.setattr(assets, "cached", lambda name: compiled if name == "smollm2" else None)
    lines = list(doctor.cache())
    assert ("", "2.5 MB of compiled programs for this machine") in lines
    assert ("smollm2", "2.5 MB") in lines
    assert "smollm2" not in dict(lines)["not fetched"]


@pytest.mark.parametrize("argv", [["--verbose"], ["x"]])
def test_arguments_are_refused(argv, capsys):
    assert doctor.main(argv) == 2
    assert capsys.readouterr().err.startswith("error: unrecognized arguments")

"""What `pip install` brings: six packages, data, configs, and pinned requirements that agree."""

from pathlib import Path
import re
import tomllib
import zipfile

from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGES = {"iaj_kernels", "lm_jax", "protot_jax", "sparse_jax", "polyattn_jax", "iaj"}
DATA_SUFFIXES = (".json", ".jsonl", ".txt", ".toml", ".j2", ".css", ".js", "py.typed")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = SETTINGS["project"]
LOCKS = {"base": [], "dev": ["dev"], "eval": ["eval"], "hpo": ["hpo"], "botorch": ["botorch"]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names inside the wheel, built by the backend itself and without network."""
    folder = str(tmp_path_factory.mktemp("wheel"))
    (path,) = WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
    assert Path(path).name == "interpretable_attention_jax-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert not [name for name in wheel if "__pycache__" in name]


def test_the_wheel_holds_every_module_and_data_file(wheel):
    wanted = {
        file.relative_to(folder).as_posix()
        for package in PACKAGES
        for folder in [ROOT / "kernels" if package == "iaj_kernels" else ROOT]
        for file in (folder / package).rglob("*")
        if file.name.endswith((".py", *DATA_SUFFIXES))
    }
    wanted |= {f"{package}/py.typed" for package in PACKAGES}
    wanted |= {
        f"lm_jax/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / "configs").rglob("*.py")
    }
    wanted |= {f"lm_jax/published/{file.name}" for file in (ROOT / "published").iterdir()}
    assert wanted <= set(wheel)


def test_transformers_comes_without_extras_and_kernels_not_at_all():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    required = [Requirement(line) for group in groups for line in group]
    assert not [r for r in required if r.name == "transformers" and r.extras]
    assert "kernels" not in {canonicalize_name(r.name) for r in required}
    assert not {"torch", "accelerate"} & {canonicalize_name(r.name) for r in required}


def test_what_runs_needs_no_installer():
    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert not needed & {"pip", "uv", "setuptools"}
    assert "pip" not in pins("base")


def pins(lock: str) -> dict[str, set[str]]:
    """Package -> the versions that requirements/`lock`.txt pins, one for each Python."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    results: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        name, version = re.match(r"([\w.-]+)==([\w.+!]+)", block).groups()
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), f"{lock}: {name} has no hash"
        results.setdefault(canonicalize_name(name), set()).add(version)
    return results


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_what_the_project_asks_for(lock):
    asked = [*PROJECT["dependencies"]]
    for extra in LOCKS[lock]:
        asked += PROJECT["optional-dependencies"][extra]
    pinned = pins(lock)
    for requirement in map(Requirement, asked):
        versions = pinned[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


@pytest.mark.parametrize("lock", [*LOCKS, "docs"])
def test_a_lock_names_no_index_and_brings_neither_torch_nor_a_gpu_package(lock):
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    assert not re.search(r"://|--(?:extra-)?index-url|--find-links|@ file", text)
    heavy = re.compile(r"torch|triton|cuda|nvidia-|kernels$")
    assert not [name for name in pins(lock) if heavy.match(name)]


@pytest.mark.parametrize("lock", ["dev", "eval", "hpo", "botorch"])
def test_the_locks_agree_with_the_base(lock):
    base, larger = pins("base"), pins(lock)
    assert {name: larger.get(name) for name in base} == base


def test_what_botorch_shares_with_the_tests_is_of_one_version():
    own, dev = pins("botorch"), pins("dev")
    both = own.keys() & dev.keys()
    assert "optuna" in both
    assert {name: own[name] for name in both} == {name: dev[name] for name in both}


def test_the_site_is_built_by_what_is_pinned_and_agrees_with_the_other_locks():
    site, dev = pins("docs"), pins("dev")
    for requirement in map(Requirement, SETTINGS["dependency-groups"]["docs"]):
        versions = site[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement
    both = site.keys() & dev.keys()
    assert {name: site[name] for name in both} == {name: dev[name] for name in both}


def test_the_interpreter_of_triton_is_one_that_the_extras_allow():
    asked = {
        Requirement(x).name: Requirement(x) for x in PROJECT["optional-dependencies"]["cuda13"]
    }
    assert asked["jax-triton"].specifier.contains(*pins("triton")["jax-triton"])
    assert asked["triton"].specifier.contains(*pins("triton")["triton"])


def test_the_compiler_is_that_of_the_jax_in_the_base():
    compiler = pins("aot")
    assert compiler["jax-cuda13-plugin"] == compiler["jax-cuda13-pjrt"]
    assert compiler["jax-cuda13-plugin"] < pins("base")["jax"]


def test_the_workflows_run_on_the_versions_of_python_that_the_project_names():
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    newest = jobs.pop("newest")
    versions = {name: job["strategy"]["matrix"]["python"] for name, job in jobs.items()}
    assert versions == {"tests": named, "wheel": [named[0], named[-1]]}
    assert {"run": ".ci/run"} in jobs["tests"]["steps"]
    # What is only tried may fail, and no classifier and no range of a version promises it.
    assert newest["continue-on-error"] is True
    assert newest["if"] == "github.event_name == 'schedule'"
    (allowed,) = [
        asked.specifier
        for line in PROJECT["dependencies"]
        if (asked := Requirement(line)).name == "jax"
    ]
    rows = [(row["python"], row["jax"]) for row in newest["strategy"]["matrix"]["include"]]
    assert len(set(rows)) == len(rows)
    for python, jax in rows:
        assert python not in named or not allowed.contains(f"{jax}.0"), (python, jax)
    tried = {python for python, _ in rows} - set(named)
    assert tried == {f"3.{int(named[-1].partition('.')[2]) + 1}"}
    assert not any(job.get("continue-on-error") for job in jobs.values())


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda f: f.name)
def test_files_for_github_name_what_is_there(file):
    text = file.read_text("utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    folder = file.parent.name
    if folder == "ISSUE_TEMPLATE" and file.name != "config.yml":
        names = [part["id"] for part in yaml.safe_load(text)["body"]]
        assert names
        assert len(set(names)) == len(names)

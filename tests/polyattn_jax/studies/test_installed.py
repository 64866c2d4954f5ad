"""The wheel, installed without dependencies and run far from the checkout, audits a model.

The dependencies are those of the environment of the tests, found without the `.pth` file by which
that environment also sees the checkout (`python -S`).
"""

import json
import os
from pathlib import Path
import subprocess
import sys
import sysconfig

from hatchling.builders.wheel import WheelBuilder
import pytest

from lm_jax.console import config_files

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(*arguments)`: Python on the wheel alone, in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    installed, elsewhere = folder / "installed", folder / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", installed, wheel], check=True)
    paths = dict.fromkeys([str(installed), *map(sysconfig.get_path, ("purelib", "platlib"))])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "INTERPRETABLE_ATTENTION_CACHE": str(folder / "cache"),
    }

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-S", *(str(a).replace("{iaj}", str(installed)) for a in arguments)],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_command_is_there(start):
    done = start("{iaj}/bin/iaj", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "iaj polyattn audit" in done.stdout


PROBE = """
import sys
import iaj, iaj_kernels, lm_jax, polyattn_jax
from lm_jax.console.config_files import load_config, shipped_names
home = sys.argv[1]
assert not [path for path in sys.path if path == sys.argv[2]]
assert all(each.__file__.startswith(home) for each in (iaj, iaj_kernels, lm_jax, polyattn_jax))
for name in shipped_names():
    assert load_config(f"{name}:smoke")
print(*shipped_names())
"""


def test_every_config_is_found_by_its_name(start):
    done = start("-c", PROBE, "{iaj}", ROOT)
    assert done.stdout.split() == config_files.shipped_names(), done.stderr
    assert len(done.stdout.split()) == len(list((ROOT / "configs").rglob("*.py")))


def test_the_models_of_the_quickstart_are_inside(start):
    names = ["protot_whole", "protot_whole_labels", "pair_192", "pair_192_sparse_transcoder"]
    done = start("{iaj}/bin/iaj", "fetch", "--verify", *names)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == names
    assert done.stdout.count("lm_jax/assets/models") == 4
    done = start("{iaj}/bin/iaj", "fetch", "pair_small")
    assert done.returncode == 3 and "iaj fetch pair_small --from CHECKOUT" in done.stderr


@pytest.mark.long
def test_an_audit_ends_with_the_numbers_of_the_checkout(start, audit_arguments, audited, tmp_path):
    arguments = ["--config=polyattn/smollm2:smoke", *audit_arguments[1:]]
    done = start("{iaj}/bin/iaj", "polyattn", "audit", *arguments, f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    own, wanted = (
        json.loads((folder / "summary.json").read_text("utf-8"))
        for folder in (tmp_path / "run", audited)
    )
    provenance, _ = own.pop("provenance"), wanted.pop("provenance")
    assert own == wanted
    assert provenance["git"] is None
    assert provenance["command"].startswith("iaj polyattn audit --config=polyattn/smollm2:smoke")
    assert (tmp_path / "run" / "report.html").is_file()

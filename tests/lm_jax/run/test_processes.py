"""Errors of joining processes, and the same functions in a single process.

Two at once in a run are in tests/protot_jax/training/test_processes.py.
"""

import contextlib
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from lm_jax.console import cli
from lm_jax.errors import ElsewhereError, UsageError
from lm_jax.parallel import sharding
from lm_jax.run import processes, stop


def main(arguments):
    raise AssertionError("a command must not start with flags that do not fit together")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--coordinator=10.0.0.1"], "not host:port"),
        (["--coordinator=10.0.0.1:port"], "not host:port"),
        (["--coordinator=10.0.0.1:80"], "here they are None and None"),
        (["--coordinator=10.0.0.1:80", "--processes=2", "--process=2"], "from 0"),
        (["--coordinator=auto", "--processes=2"], "leave them out"),
        (["--process=1"], "need --coordinator"),
    ],
)
def test_flags_that_do_not_fit_together(flags, said, capsys):
    before = jax.config.jax_enable_preemption_service
    assert cli.run(main, ["test", "--workdir=run", *flags], distributed=True) == 2
    assert said in capsys.readouterr().err
    assert jax.config.jax_enable_preemption_service == before


def test_a_command_of_one_process_has_no_such_flags(capsys):
    assert cli.run(main, ["test", "--workdir=run", "--processes=2"]) == 2
    assert "--processes is not a flag of this command" in capsys.readouterr().err


# The ports from which JAX takes one by the number of a Slurm job.
PORTS = 61_440, 4_096


def free_job():
    """The number of a job whose port nobody has."""
    first, count = PORTS
    for job in range(os.getpid(), os.getpid() + count):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", first + job % count))
            return job
    raise AssertionError("all ports are taken")


def test_auto_joins_the_tasks_of_a_slurm_job():
    """With the variables of two tasks on a node, of which the list of nodes is the first."""
    code = """
import jax
import numpy as np
from lm_jax.run import processes

processes.join("auto", None, None)
print(processes.is_first(), processes.gather(np.array([10 + jax.process_index()])).tolist())
"""
    job = free_job()
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ
            | {
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_NODELIST": "localhost,elsewhere",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(index),
                "SLURM_LOCALID": str(index),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outs = [task.communicate(timeout=150)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    # Gloo speaks first.
    assert [out.splitlines()[-1] for out in outs] == ["True [10, 11]", "False [10, 11]"]


def test_auto_without_a_launcher_is_refused():
    """In a process of its own, for JAX looks for a launcher only as long as it has no backend."""
    code = (
        "import sys; from lm_jax.console import cli; "
        "argv = ['test', '--workdir=run', '--coordinator=auto']; "
        "sys.exit(cli.run(print, argv, distributed=True))"
    )
    launchers = ("SLURM_", "OMPI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert ended.returncode == 2
    assert "JAX knows no launcher here" in ended.stderr


def test_one_process_is_the_first_and_all():
    assert processes.is_first()
    assert processes.on_first(lambda: 3) == 3
    assert processes.on_first(lambda: None) == 0
    with pytest.raises(UsageError, match="as it was"):
        processes.on_first(_refuse)
    np.testing.assert_array_equal(processes.gather(np.arange(3)), np.arange(3))


def _refuse():
    raise UsageError("as it was")


def test_what_process_0_refuses_to_open_the_others_do_not_log_in(tmp_path, monkeypatch):
    """It may be the folder of another run."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    heard = np.array([UsageError.exit_code, 0])
    monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", lambda _: heard)
    opening = processes.open_shared_workdir(tmp_path, {})
    with pytest.raises(ElsewhereError, match="process 0") as caught, opening:
        pytest.fail("opened")
    assert caught.value.exit_code == UsageError.exit_code
    assert not list(tmp_path.iterdir())


def test_a_stop_is_shared_with_nobody():
    def main(arguments):
        del arguments
        assert not processes.share_stop()
        stop.request()
        assert processes.share_stop()
        stop.check("in the test")

    assert cli.run(main, ["test"], workdir_required=False) == 75


def test_a_signal_that_the_others_have_not_heard_of_waits(monkeypatch):
    def gather(asked):
        # The signal arrives after all processes have agreed that none was requested.
        stop.request()
        return np.array([asked, False])

    def main(arguments):
        del arguments
        assert not processes.share_stop()
        assert processes.share_stop()

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert cli.run(main, ["test"], workdir_required=False) == 0


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (1, 1, 4)])
def test_one_process_holds_every_row(sizes):
    data, fsdp, tensor = sizes
    assert sharding.batch_share(sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)) == (0, 1)


def test_fetched_arrays_are_whole():
    mesh = sharding.make_mesh(data=2, fsdp=2)
    x_BT = np.arange(24.0).reshape(8, 3)
    fetched = sharding.fetch({"x": sharding.shard_batch(mesh, x_BT)})["x"]
    assert isinstance(fetched, np.ndarray)
    np.testing.assert_array_equal(fetched, x_BT)

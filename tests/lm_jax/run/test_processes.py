"""Errors of joining processes, and the same functions in a single process.

Two at once are in tests/protot_jax/test_processes.py.
"""

import jax
import numpy as np
import pytest

from lm_jax.errors import UsageError
from lm_jax.parallel import sharding
from lm_jax.run import cli, processes, stop


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


def test_one_process_is_the_first_and_all():
    assert processes.is_first()
    assert processes.on_first(lambda: 3) == 3
    assert processes.on_first(lambda: None) == 0
    with pytest.raises(UsageError, match="as it was"):
        processes.on_first(_refuse)
    np.testing.assert_array_equal(processes.gather(np.arange(3)), np.arange(3))


def _refuse():
    raise UsageError("as it was")


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

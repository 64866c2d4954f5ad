"""The frame of a study: a command that measures, keeps rows, and writes a summary and a page.

A study is a package with five files beside its `__init__.py`,

    settings.py    what may be set: one dataclass, with the bounds at its fields (`Settings`)
    run.py         what is measured
    numbers.py     rows in, summary out: every number of the page
    results.py     the dataclasses of rows and summary
    report.py      what the page and the terminal say, with a template of its paragraphs

and `__init__.py` declares it:

    STUDY = Study(
        command="sparse two_hop",
        config=TwoHopConfig,
        modes={"smoke": smoke},
        summary=TwoHopSummary,
        inputs=None,
        run="run:measure",
        report="report:build",
    )

`frame` does the rest, for all studies alike: the work folder and its lock, resuming, provenance,
the comparison of inputs before "finished", the strict summary, the page and the text of the
terminal. `command` has the flags, the help and the exit codes.
"""

from lm_jax.run.settings import Settings
from lm_jax.study.declaration import Distributed, Study, Training
from lm_jax.study.work import Opened, Work

__all__ = ["Distributed", "Opened", "Settings", "Study", "Training", "Work"]

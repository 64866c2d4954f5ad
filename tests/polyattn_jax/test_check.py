"""The check exits 0 for preserve and 10 for no-go, and prints what it rests on."""

import json

import numpy as np
import pytest

from polyattn_jax import check

from lm_jax import stats


@pytest.fixture(scope="session")
def run_check(tiny, haystack):
    from conftest import run

    def command(*argv):
        pass

    return command

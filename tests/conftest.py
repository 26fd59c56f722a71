"""What holds for all tests. Hypothesis: the same examples in every run, no deadlines (machines are
shared).

`HYPOTHESIS_PROFILE=deep` looks for new ones, ten times as many.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def root_level() -> Iterator[None]:
    """A command that a test runs in this process sets it, and the next test must not notice."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)

"""Hypothesis: the same examples in every run, no deadlines (machines are shared).

`HYPOTHESIS_PROFILE=deep` looks for new ones, ten times as many.
"""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

"""What tests of whole roles with the real engines have in common."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def engine_python() -> str:
    found = os.environ.get("ASYNCGRPO_ENGINE_PYTHON", "")
    if not found:
        pytest.skip("ASYNCGRPO_ENGINE_PYTHON names no Python with vLLM and TRL")
    return found

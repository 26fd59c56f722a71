"""The frozen agent, as scripts/build has made it; without it these tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.frozen import FORMS, built


@pytest.fixture(params=FORMS)
def program(request: pytest.FixtureRequest) -> Path:
    """Either form in turn."""
    return built(request.param)


@pytest.fixture
def onefile() -> Path:
    return built("one-file")


@pytest.fixture
def onedir() -> Path:
    return built("one-folder")

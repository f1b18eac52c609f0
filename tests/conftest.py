"""Settings of all tests: no example is timed, none depends on what an earlier run found."""

import sys

import pytest
from hypothesis import settings

settings.register_profile("meshrl", deadline=None, derandomize=True, database=None)
settings.load_profile("meshrl")


@pytest.fixture(autouse=True)
def _same_modules_for_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that a test makes importable are forgotten after it; workers inherit them."""
    monkeypatch.setattr(sys, "path", list(sys.path))

"""What tests of one session share."""

from __future__ import annotations

import pytest

from tests.orchestrator.fakes import record
from tests.orchestrator.story import Story


@pytest.fixture
def story() -> Story:
    """Four steps of two micro-batches."""
    return Story(record())

from __future__ import annotations

from collections.abc import Iterator

import pytest
from observed_run import ObservedRun, observed_run


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedRun]:
    """A run that goes on, shared by all tests that look at one."""
    with observed_run(tmp_path_factory.mktemp("observed")) as run:
        yield run

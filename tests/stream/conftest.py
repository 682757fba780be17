"""What several files of the stream's tests ask for."""

from __future__ import annotations

import pytest
import stream_client


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of `stream_client` use the shared-memory lane."""
    monkeypatch.setattr(stream_client, "SHARED_MEMORY", True)
    monkeypatch.setitem(stream_client.QUICK, "silent_seconds", 4.0)  # a ring is waited for half as long again

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.stranger_log import StrangerLog


async def test_lines_come_once_in_a_while(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    log, lines = Log(__name__), StrangerLog()
    caplog.set_level("INFO")
    for _ in range(25):
        lines.note(log.info, "accept.refused", "stranger", peer="192.0.2.1:1", reason="x")
        await trio.sleep(1)
    lines.note(log.warning, "accept.refused", "capacity", reason="x")
    lines.note(log.info, "stream.failed", "stranger", reason="x")
    fields = [vars(record)["agent_fields"] for record in caplog.records]
    assert [field["held_back"] for field in fields] == [0, 9, 9, 0, 0]
    assert fields[0] == {"peer": "192.0.2.1:1", "reason": "x", "held_back": 0}
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "INFO", "WARNING", "INFO"]

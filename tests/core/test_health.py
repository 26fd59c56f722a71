"""When a run needs somebody."""

from typing import Any

import pytest

from asyncgrpo_agent.core.health import faults


def snapshot(*alerts: dict[str, str], verdict: str = "balanced", **run: Any) -> dict[str, Any]:
    row = {
        "state": "running",
        "attempt": "a0001-56f0",
        "ready": 2,
        "registered": 2,
        "trainer": True,
    }
    row |= {"verdict": {"kind": verdict, "sentence": "Degraded: 2 of 3."}, **run}
    return {"run": row, "alerts": list(alerts)}


def alert(severity: str) -> dict[str, str]:
    return {"severity": severity, "sentence": "The ratio."}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (snapshot(), []),
        (snapshot(alert("warning")), []),
        (snapshot(alert("error")), ["The ratio."]),
        (snapshot(verdict="degraded"), ["Degraded: 2 of 3."]),
        (snapshot(state="failed"), ["The trainer has failed."]),
        (snapshot(state="waiting"), ["Training has not begun."]),
        (snapshot(state="waiting", trainer=False), ["The trainer is not connected."]),
        (snapshot(state="waiting", attempt="", trainer=False), ["No trainer has come yet."]),
        (snapshot(ready=0), ["None of 2 replicas is ready."]),
        (snapshot(alert("error"), state="finished", ready=0), []),
    ],
)
def test_faults(shown: dict[str, Any], expected: list[str]) -> None:
    assert faults(shown) == expected

"""Whether a run needs somebody: what `status` exits with, and why.

Read from a run's snapshot as the proxy shows it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def faults(snapshot: Mapping[str, Any]) -> list[str]:
    """One sentence for each reason; none for a run that is well, or finished."""
    run = snapshot["run"]
    if run["state"] in ("finished", "past"):
        return []
    found = []
    if run["state"] == "failed":
        found.append("The trainer has failed.")
    elif run["state"] == "waiting":
        gone = "The trainer is not connected." if run["attempt"] else "No trainer has come yet."
        found.append("Training has not begun." if run.get("trainer") else gone)
    if not run["ready"]:
        found.append(f"None of {run['registered']} replicas is ready.")
    verdict = run.get("verdict") or {}
    if verdict.get("kind") == "degraded":
        found.append(verdict["sentence"])
    found += [one["sentence"] for one in snapshot.get("alerts", ()) if one["severity"] == "error"]
    return found

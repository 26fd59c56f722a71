"""How many adapters a replica's vLLM must have room for, so that stragglers starve nobody.

vLLM runs at most `max_loras` distinct adapters at once and lets requests for any other wait. The
newest version and those that TRL may still name, `max_staleness` of them, take a slot each; beside
them is the version that is being loaded, one for all stragglers of retired versions, and two that
the gateway keeps from TRL's view. Pure.
"""

from __future__ import annotations

from typing import Final

DEFAULT_MAX_STALENESS: Final = 4  # TRL's own default
SPARE_SLOTS: Final = 4
UNKNOWN_STALENESS: Final = -1


def needed_slots(max_staleness: int) -> int:
    return max_staleness + SPARE_SLOTS


def slots_fault(max_staleness: int, max_loras: int, max_cpu_loras: int) -> str | None:
    """Why a vLLM has too few slots for a run, or None. A negative staleness and 0 are unknown."""
    if max_staleness < 0:
        return None
    needed = needed_slots(max_staleness)
    if max_loras < needed:
        return (
            f"its engine.max_loras is {max_loras}, and the run's max_staleness {max_staleness}"
            f" needs {needed}: set it on that replica"
        )
    if 0 < max_cpu_loras < needed:
        return (
            f"its vLLM keeps {max_cpu_loras} adapters (--max-cpu-loras), and the run's"
            f" max_staleness {max_staleness} needs {needed}: raise engine.max_loras on that replica"
        )
    return None

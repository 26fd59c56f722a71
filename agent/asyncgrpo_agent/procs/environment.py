"""The environment of a child: the agent's own, less what must not leak, plus what it needs.

A frozen agent runs with LD_LIBRARY_PATH set to its own libraries. A child that inherits it loads
them instead of the ones it was built with: the engine's Python silently becomes another Python.
So the value from before is restored, or the variable is dropped, for every child without
exception. Secrets of the agent and the variables by which systemd talks to it stay here too.

Pure: the caller passes the environment that it starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

# engine: vLLM or TRL. agent: this program again. tool: anything else, which needs no GPU and no
# access to model hubs.
Kind = Literal["engine", "agent", "tool"]

_NEVER: Final = (
    "_PYI_",
    "_MEIPASS",
    "PYINSTALLER_",
    "ASYNCGRPO_",
    "NOTIFY_SOCKET",
    "WATCHDOG_",
    "LISTEN_FDS",
    "LISTEN_PID",
    "CREDENTIALS_DIRECTORY",
)
_NOT_FOR_TOOLS: Final = ("CUDA_", "NVIDIA_", "HF_", "HUGGING_FACE_", "HUGGINGFACE_")
_LIBRARIES: Final = "LD_LIBRARY_PATH"
_LIBRARIES_BEFORE: Final = "LD_LIBRARY_PATH_ORIG"


def child_environment(
    base: Mapping[str, str], additions: Mapping[str, str], *, frozen: bool, kind: Kind = "engine"
) -> dict[str, str]:
    """What a child of `kind` gets when the agent itself runs in `base`. `additions` win."""
    dropped = _NEVER if kind != "tool" else _NEVER + _NOT_FOR_TOOLS
    environment = {name: value for name, value in base.items() if not name.startswith(dropped)}
    before = environment.pop(_LIBRARIES_BEFORE, None)
    if frozen:
        environment.pop(_LIBRARIES, None)
        if before:
            environment[_LIBRARIES] = before
    if kind == "agent":
        # Without it a frozen agent takes itself for part of this one and shares its folder.
        environment["PYINSTALLER_RESET_ENVIRONMENT"] = "1"
    return environment | dict(additions)

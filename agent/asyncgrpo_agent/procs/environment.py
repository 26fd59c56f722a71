"""The environment of a child: the agent's own, less what must not leak, plus what it needs.

A frozen agent runs with LD_LIBRARY_PATH set to its own libraries. A child that inherits it loads
them instead of the ones it was built with: the engine's Python silently becomes another Python.
So the value from before is restored, or the variable is dropped, for every child but a worker,
which runs from the same folder. Secrets of the agent and the variables by which systemd talks to it
stay here too. Keys of the bucket are for the bucket's mount alone: what an engine needs of them,
its own section names.

Pure: the caller passes the environment that it starts from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from asyncgrpo_agent.config.redaction import is_secret
from asyncgrpo_agent.logs import MIN_SECRET_CHARACTERS

# engine: TRL, whose rewards and trackers need what the user gave them. server: vLLM, or a download,
# which need a hub's token and no other secret. agent: this program again, on its own. worker: this
# program as a part of the one that starts it. mount: the bucket's daemon. tool: anything else,
# which needs no GPU and no access to model hubs.
Kind = Literal["engine", "server", "agent", "worker", "mount", "tool"]

_PRIVATE: Final = (
    "ASYNCGRPO_",
    "NOTIFY_SOCKET",
    "WATCHDOG_",
    "LISTEN_FDS",
    "LISTEN_PID",
    "CREDENTIALS_DIRECTORY",
)
_NEVER: Final = ("_PYI_", "_MEIPASS", "PYINSTALLER_", *_PRIVATE)
_NOT_FOR_TOOLS: Final = ("CUDA_", "NVIDIA_", "HF_", "HUGGING_FACE_", "HUGGINGFACE_")
_BUCKET_KEYS: Final = ("AWS_",)
_TRACKERS: Final = ("WANDB_",)
# With a password, maybe. A worker reads files.
_PROXIES: Final = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy"),
)
_HUB_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# The daemon of a mount gets nothing else.
_FOR_MOUNTS: Final = (
    *("PATH", "HOME", "USER", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("AWS_", "SSL_CERT_", "MOUNTPOINT_LOG"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
_DROPPED: Final[Mapping[Kind, tuple[str, ...]]] = {
    "engine": (*_NEVER, *_BUCKET_KEYS),
    "server": (*_NEVER, *_BUCKET_KEYS, *_TRACKERS),
    "agent": _NEVER,
    "worker": (*_PRIVATE, *_BUCKET_KEYS, *_TRACKERS, *_NOT_FOR_TOOLS, *_PROXIES),
    "mount": _NEVER,
    "tool": (*_NEVER, *_BUCKET_KEYS, *_TRACKERS, *_NOT_FOR_TOOLS),
}
_PASSWORD: Final = re.compile(r"://[^/\s@:]*:([^/\s@]+)@")
_LIBRARIES: Final = "LD_LIBRARY_PATH"
_LIBRARIES_BEFORE: Final = "LD_LIBRARY_PATH_ORIG"


def gpu_variables(gpus: str) -> dict[str, str]:
    """What confines an engine to `gpus`, as "0,1"; nothing without any. Not run on a GPU.

    CUDA by itself numbers the fastest first; users mean the numbers that nvidia-smi shows.
    """
    return {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}


def cache_variables(folder: str) -> dict[str, str]:
    """Where vLLM, inductor, Triton, FlashInfer and CUDA keep what they compile.

    Not in ~/.cache: services have no home, and in a container only the state may be of any length.
    """
    places = {
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "CUDA_CACHE_PATH": "cuda",
    }
    return {name: f"{folder}/{place}" for name, place in places.items()} if folder else {}


def child_environment(
    base: Mapping[str, str],
    additions: Mapping[str, str],
    *,
    frozen: bool,
    kind: Kind = "engine",
    gpus: str = "",
    caches: str = "",
) -> dict[str, str]:
    """What a child of `kind` gets when the agent itself runs in `base`. `additions` win, but an
    engine's `gpus` are not to be argued with. `caches` is a folder for what engines compile, used
    where the user has not chosen another."""
    environment = cache_variables(caches)
    environment |= {
        name: value for name, value in base.items() if not name.startswith(_DROPPED[kind])
    }
    if kind in ("server", "worker"):
        kept = environment.items()
        environment = {
            name: value for name, value in kept if name in _HUB_TOKENS or not is_secret(name)
        }
    if kind == "mount":
        kept = environment.items()
        environment = {name: value for name, value in kept if name.startswith(_FOR_MOUNTS)}
    if kind == "worker":  # a frozen one shares the folder and the libraries of this process
        return environment | dict(additions)
    before = environment.pop(_LIBRARIES_BEFORE, None)
    if frozen:
        environment.pop(_LIBRARIES, None)
        if before:
            environment[_LIBRARIES] = before
    if kind == "agent":
        # Without it a frozen agent takes itself for part of this one and shares its folder.
        environment["PYINSTALLER_RESET_ENVIRONMENT"] = "1"
    return environment | dict(additions) | gpu_variables(gpus)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """What no output must repeat of an environment, longest first; of URLs the passwords."""
    found = {value for name, value in environment.items() if is_secret(name)}
    found |= {password for value in environment.values() for password in _PASSWORD.findall(value)}
    long = [value for value in found if len(value) >= MIN_SECRET_CHARACTERS]
    return sorted(long, key=len, reverse=True)

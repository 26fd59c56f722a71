"""vLLM as a child: its command line, its environment, its socket, and what its last words mean.

Every flag and variable of vLLM that the agent relies on is in this module (see
`net.engine_client` for routes and metrics). Flags that the user may not give are refused where the
configuration is read. Nothing here starts a process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_LAST_LINES: Final = 12
_SAID_CHARS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One vLLM. `cpu` says that it runs without a GPU, which needs other flags."""

    python: str
    module: str
    model_path: str
    served_name: str
    socket_path: str
    args: tuple[str, ...]
    max_loras: int
    max_lora_rank: int
    dtype: str
    cpu: bool
    trust_remote_code: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def engine_command(spec: EngineSpec) -> tuple[list[str], dict[str, str]]:
    """The command line and what it adds to the environment. The user's own words come last."""
    argv = [
        *(spec.python, "-m", spec.module),
        *("--model", spec.model_path),
        *("--uds", spec.socket_path),
        *("--served-model-name", spec.served_name),
        "--enable-lora",
        *("--max-loras", str(spec.max_loras)),
        *("--max-lora-rank", str(spec.max_lora_rank)),
        # Names of adapters are never used again, and their files are on local disk.
        *("--max-cpu-loras", str(2 * spec.max_loras)),
        *_unless_given(spec.args, "--logprobs-mode", "processed_logprobs"),  # what TRL expects
        *_unless_given(spec.args, "--generation-config", "vllm"),  # not the model's own sampling
        "--disable-uvicorn-access-log",
        *("--dtype", "float32" if spec.cpu and spec.dtype == "auto" else spec.dtype),
    ]
    if spec.trust_remote_code:
        argv.append("--trust-remote-code")
    if spec.cpu:
        # TRL seeds every request, and on the CPU a seeded prompt must not be split: it kills vLLM.
        # How many tokens a batch then needs follows from the model's length; vLLM knows that.
        argv += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*argv, *spec.args], _environment(spec)


def gpus_per_engine(args: Sequence[str]) -> int:
    """GPUs that one engine with these flags of vLLM's takes: tensor times pipeline parallel.

    ValueError if a size is no whole number.
    """
    sizes = {"tensor": 1, "pipeline": 1}
    names = {"--tensor-parallel-size": "tensor", "-tp": "tensor"}
    names |= {"--pipeline-parallel-size": "pipeline", "-pp": "pipeline"}
    words = list(args)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        name = names.get(flag.replace("_", "-"))
        if name is not None:
            text = value if equals else next(iter(words[at + 1 : at + 2]), "")
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise ValueError(f"{flag} is no whole number: {text!r}")
            sizes[name] = int(text)
    return sizes["tensor"] * sizes["pipeline"]


def _unless_given(args: tuple[str, ...], flag: str, value: str) -> list[str]:
    given = {arg.partition("=")[0].replace("_", "-") for arg in args}  # vLLM takes either
    return [] if flag in given else [flag, value]


def _environment(spec: EngineSpec) -> dict[str, str]:
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder, so is every adapter
        "PYTHONUNBUFFERED": "1",
    }
    if spec.cpu:
        defaults |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Each engine would bind itself to the same core otherwise.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Without a compiler the sampler cannot be compiled, and with one it takes 4 to 28 s.
            "TORCHDYNAMO_DISABLE": "1",
        }
    owned = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_API_KEY": "",  # one from the user's shell would lock the agent out
    }
    return {**defaults, **spec.env, **owned}


def has_gpu() -> bool:
    """Whether this host shows a GPU that vLLM could use: NVIDIA, AMD or WSL device files."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def shell_line(argv: list[str], additions: Mapping[str, str]) -> str:
    """The command as a person would type it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(additions.items())]
    return " ".join([*words, shlex.join(argv)])


# Looked for in the order of this list: vLLM's last lines may hold several, the first is the cause.
_CAUSES: Final = (
    (
        r"No module named '?(vllm|torch)'?(\)|$)",
        "engine.python has no vLLM: point it to the Python of the engine's environment",
    ),
    (r"unrecognized arguments", "vLLM does not know a flag in engine.args or after --"),
    (
        r"argument --max-lora-rank: invalid choice|LoRA rank \d+ is greater",
        "Set engine.max_lora_rank to a rank that vLLM has, no smaller than the adapters'",
    ),
    (
        r"Invalid repository ID or local directory|does not appear to have a file named|"
        r"Unrecognized model|is not a valid JSON file|Error no file named|"
        r"Model architectures .* not supported|Cannot find any model weights",
        "model.path is not a model that this vLLM knows: download it whole, or take another",
    ),
    (
        r"does not support LoRA",
        "vLLM has no LoRA for this model: take another",
    ),
    (
        r"max_num_batched_tokens .* is smaller than max_model_len",
        "Raise --max-num-batched-tokens to the model's length, or lower --max-model-len",
    ),
    (
        r"(Free|Available) memory on (device|node) .* less than desired",
        "Something else holds the memory: stop it, or lower --gpu-memory-utilization",
    ),
    (
        r"out of memory|OutOfMemoryError|No available memory for the cache blocks|"
        r"larger than the available KV cache",
        "The memory is too small or taken: lower --max-model-len, raise "
        "--gpu-memory-utilization (VLLM_CPU_KVCACHE_SPACE in [engine.env] without a GPU), or stop "
        "what else uses it",
    ),
    (
        r"No working C\+\+ compiler|InvalidCxxCompiler|Failed to find C compiler",
        "vLLM compiles code and found no compiler: install gcc and g++, or set "
        "TORCHDYNAMO_DISABLE=1 in [engine.env]",
    ),
    (
        r"CPU Generator does not use offset",
        "A seeded prompt was split: give --no-enable-chunked-prefill",
    ),
    (
        r"no attribute 'init_cpu_memory_env'|lib(numa|gomp)\S*: cannot open shared object",
        "vLLM's own library could not be loaded: install libnuma1 and libgomp1",
    ),
    (r"lscpu", "vLLM runs lscpu: install util-linux, and mount /sys"),
    (r"AF_UNIX path too long", "Set XDG_RUNTIME_DIR to a shorter path"),
    (r"Address already in use", "Another vLLM uses this socket"),
    (r"Failed to infer device type", "vLLM found neither a GPU nor its CPU build"),
)


def explain_failure(tail: str) -> str:
    """The cause that vLLM's last lines give away, with its remedy, and those lines.

    Give as many lines as the child keeps: the cause is up to 120 lines above the end.
    """
    lines = tail.splitlines()
    last = "Its last lines:\n" + "\n".join(lines[-_LAST_LINES:])
    for pattern, remedy in _CAUSES:
        said = next((line for line in lines if re.search(pattern, line)), None)
        if said is not None:
            return f"{remedy}. It said: {said[:_SAID_CHARS]}\n{last}"
    return last

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from asyncgrpo_agent.config.rules import engine_args_problems
from asyncgrpo_agent.procs.vllm import (
    EngineSpec,
    engine_command,
    explain_failure,
    gpus_per_engine,
    shell_line,
)

SPEC = EngineSpec(
    python="/engine/bin/python",
    module="vllm.entrypoints.openai.api_server",
    model_path="/models/qwen",
    served_name="qwen",
    socket_path="/run/agrpo/vllm.sock",
    args=(),
    max_loras=8,
    max_lora_rank=16,
    dtype="auto",
    cpu=False,
)
ON_CPU = replace(SPEC, cpu=True)
# Lines of a vLLM that came up.
USUAL = """non-default args: {'max_loras': 8, 'max_lora_rank': 16, 'max_num_batched_tokens': 2048}
Failed to import the DeepSelect extension: No module named 'vllm._deepselect_C'
current limit exceeds maximum limit. This can cause OSError: [Errno 24] Too many open files.
Warning: NUMA binding: Using MEMBIND policy on the nodes (0). (function init_cpu_memory_env)"""


def value(argv: list[str], flag: str) -> str:
    """What follows `flag`, which must be there once."""
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_server_listens_on_its_socket_only() -> None:
    argv, _ = engine_command(SPEC)
    assert argv[:3] == ["/engine/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(argv, "--uds") == "/run/agrpo/vllm.sock"
    assert not {"--host", "--port"} & set(argv)


def test_adapters_can_be_loaded_at_run_time() -> None:
    argv, additions = engine_command(SPEC)
    assert "--enable-lora" in argv
    assert (value(argv, "--max-loras"), value(argv, "--max-lora-rank")) == ("8", "16")
    assert additions["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert additions["VLLM_SERVER_DEV_MODE"] == "1"


def test_user_may_say_everything_that_configuration_lets_through() -> None:
    args = (
        "--max-model-len",
        "4096",
        "--logprobs_mode=raw_logprobs",
        "--generation-config",
        "auto",
    )
    assert not list(engine_args_problems(args, ""))
    argv, _ = engine_command(replace(SPEC, args=args))
    assert argv[-5:] == list(args)
    assert "--logprobs-mode" not in argv
    assert value(argv, "--generation-config") == "auto"


def test_probabilities_are_those_that_sampled() -> None:
    argv, _ = engine_command(SPEC)
    assert value(argv, "--logprobs-mode") == "processed_logprobs"
    assert value(argv, "--generation-config") == "vllm"


def test_remote_code_is_run_on_request_only() -> None:
    assert "--trust-remote-code" not in engine_command(SPEC)[0]
    assert "--trust-remote-code" in engine_command(replace(SPEC, trust_remote_code=True))[0]


def test_gpu_engine_gets_nothing_of_the_cpu() -> None:
    argv, additions = engine_command(SPEC)
    assert value(argv, "--dtype") == "auto"
    assert not {"--enforce-eager", "--no-enable-chunked-prefill"} & set(argv)
    assert not {name for name in additions if "CPU" in name or "DYNAMO" in name}


def test_cpu_engine_is_eager_and_splits_no_prompt() -> None:
    argv, additions = engine_command(ON_CPU)
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(argv)
    assert value(argv, "--dtype") == "float32"
    assert additions["VLLM_TARGET_DEVICE"] == "cpu"
    assert additions["TORCHDYNAMO_DISABLE"] == "1"
    # Bound by itself, every engine of a host would take the same core.
    assert additions["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_batch_size_is_left_to_vllm_which_knows_the_length_of_the_model() -> None:
    assert "--max-num-batched-tokens" not in engine_command(ON_CPU)[0]


def test_number_format_that_was_asked_for_is_used_on_the_cpu_too() -> None:
    assert value(engine_command(replace(ON_CPU, dtype="bfloat16"))[0], "--dtype") == "bfloat16"


def test_environment_of_the_user_wins_but_for_what_the_agent_relies_on() -> None:
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "2",
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_API_KEY": "from the shell",
    }
    _, additions = engine_command(replace(ON_CPU, env=env))
    assert additions["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert additions["HF_HUB_OFFLINE"] == "0"
    assert additions["OMP_NUM_THREADS"] == "2"
    assert additions["VLLM_SERVER_DEV_MODE"] == "1"
    assert additions["VLLM_API_KEY"] == ""


def test_nothing_is_reported_to_anybody() -> None:
    _, additions = engine_command(SPEC)
    assert additions["VLLM_NO_USAGE_STATS"] == additions["DO_NOT_TRACK"] == "1"


def test_shell_line_can_be_pasted() -> None:
    argv = ["/my engine/python", "-m", "vllm", "--json", '{"a": "$b"}']
    words = shlex.split(shell_line(argv, {"B": "two words", "A": "1"}))
    assert words == ["A=1", "B=two words", *argv]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("python: No module named 'vllm'", "has no vLLM"),
        ("(ModuleNotFoundError: No module named 'vllm')", "has no vLLM"),
        ("api_server.py: error: unrecognized arguments: --nonsense", "does not know a flag"),
        ("error: argument --max-lora-rank: invalid choice: 7 (choose from", "max_lora_rank"),
        ("Value error, Invalid repository ID or local directory specified: '/m'", "model.path"),
        ("OSError: the config file at '/m/config.json' is not a valid JSON file.", "model.path"),
        (
            "max_num_batched_tokens (2048) is smaller than max_model_len (8192).",
            "--max-num-batched-tokens",
        ),
        (
            "ValueError: Free memory on device cuda:0 (1.2/79.1 GiB) on startup is less than "
            "desired GPU memory utilization (0.9, 71.2 GiB).",
            "Something else holds the memory",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "memory is too small"),
        ("KV cache is needed, which is larger than the available KV cache", "memory is too small"),
        ("InvalidCxxCompiler: No working C++ compiler found", "install gcc and g++"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "install gcc and g++"),
        ("RuntimeError: CPU Generator does not use offset", "--no-enable-chunked-prefill"),
        ("AttributeError: '_C' object has no attribute 'init_cpu_memory_env'", "libnuma1"),
    ],
)
def test_usual_causes_are_named(line: str, remedy: str) -> None:
    # What vLLM always prints must not be taken for a cause.
    text = explain_failure(f"{USUAL}\n{line}")
    assert remedy in text.splitlines()[0]
    assert line in text


def test_cause_far_above_the_end_is_quoted() -> None:
    cause = "ERROR [core.py:1433] ValueError: No available memory for the cache blocks."
    tracebacks = [f"  File api_server.py, line {number}" for number in range(120)]
    text = explain_failure("\n".join([cause, *tracebacks]))
    assert cause in text.splitlines()[0]
    assert text.endswith(tracebacks[-1])


def test_lines_of_a_healthy_start_are_no_cause() -> None:
    assert explain_failure(USUAL).startswith("Its last lines:")


def test_unknown_cause_is_left_to_the_last_lines() -> None:
    tail = "\n".join(f"line {number}" for number in range(50))
    assert explain_failure(tail).splitlines() == [
        "Its last lines:",
        *[f"line {number}" for number in range(38, 50)],
    ]


def test_gpus_of_one_engine() -> None:
    assert gpus_per_engine([]) == 1
    assert gpus_per_engine(["--tensor-parallel-size", "2", "-pp=3"]) == 6
    assert gpus_per_engine(["--tensor_parallel_size=4"]) == 4
    with pytest.raises(ValueError, match="no whole number"):
        gpus_per_engine(["-tp", "--enforce-eager"])

from __future__ import annotations

import pytest

from asyncgrpo_agent.procs.environment import Kind, child_environment, secret_values

FROZEN = {
    "LD_LIBRARY_PATH": "/opt/agent/_internal",
    "_PYI_ARCHIVE_FILE": "/opt/agent/asyncgrpo-agent",
    "_PYI_APPLICATION_HOME_DIR": "/opt/agent/_internal",
    "_MEIPASS2": "/tmp/_MEI1",
    "PATH": "/usr/bin",
}


def test_frozen_library_path_is_dropped() -> None:
    assert child_environment(FROZEN, {}, frozen=True) == {"PATH": "/usr/bin"}


def test_library_path_from_before_the_freeze_is_restored() -> None:
    base = {**FROZEN, "LD_LIBRARY_PATH_ORIG": "/usr/local/cuda/lib64"}
    assert child_environment(base, {}, frozen=True) == {
        "PATH": "/usr/bin",
        "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    }


def test_library_path_stays_when_nothing_is_frozen() -> None:
    base = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}
    assert child_environment(base, {}, frozen=False) == base


@pytest.mark.parametrize(
    "name",
    [
        "ASYNCGRPO_JOIN",
        "ASYNCGRPO_TRAIN_LORA_R",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "CREDENTIALS_DIRECTORY",
        "LISTEN_FDS",
    ],
)
@pytest.mark.parametrize("kind", ["engine", "server", "agent", "mount", "tool"])
def test_what_is_meant_for_the_agent_alone_stays_with_it(name: str, kind: str) -> None:
    environment = child_environment({name: "secret"}, {}, frozen=False, kind=kind)  # type: ignore[arg-type]
    assert name not in environment


def test_gpus_and_model_hubs_are_for_engines() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "secret", "LANG": "C.UTF-8"}
    assert child_environment(base, {}, frozen=False) == base
    assert child_environment(base, {}, frozen=False, kind="tool") == {"LANG": "C.UTF-8"}


@pytest.mark.parametrize("kind", ["server", "worker", "mount"])
def test_what_serves_and_what_works_for_the_agent_gets_no_secret_of_the_user(kind: Kind) -> None:
    base = {"OPENAI_API_KEY": "x", "WANDB_API_KEY": "x", "GITHUB_TOKEN": "x", "LANG": "C"}
    environment = child_environment(base, {}, frozen=False, kind=kind)
    assert environment == {"LANG": "C"}
    assert child_environment(base, {}, frozen=False) == base  # rewards may need theirs


def test_a_server_gets_the_hubs_token_and_what_it_is_given() -> None:
    base = {"HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    environment = child_environment(base, {"MY_KEY": "y"}, frozen=False, kind="server")
    assert environment == {"HF_TOKEN": "x", "MY_KEY": "y"}


def test_another_agent_starts_as_a_new_program() -> None:
    environment = child_environment(FROZEN, {}, frozen=True, kind="agent")
    assert environment == {"PATH": "/usr/bin", "PYINSTALLER_RESET_ENVIRONMENT": "1"}


def test_additions_win() -> None:
    base = {"ASYNCGRPO_JOIN": "old", "A": "1"}
    additions = {"ASYNCGRPO_JOIN": "new", "A": "2"}
    assert child_environment(base, additions, frozen=False, kind="agent") == {
        **additions,
        "PYINSTALLER_RESET_ENVIRONMENT": "1",
    }


AWS = {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu"}


@pytest.mark.parametrize(("kind", "kept"), [("engine", {}), ("tool", {}), ("agent", AWS)])
def test_keys_of_the_bucket_are_not_for_engines(kind: Kind, kept: dict[str, str]) -> None:
    environment = child_environment({**AWS, "LANG": "C"}, {}, frozen=False, kind=kind)
    environment.pop("PYINSTALLER_RESET_ENVIRONMENT", None)
    assert environment == {**kept, "LANG": "C"}


def test_an_engine_gets_what_its_own_section_names() -> None:
    environment = child_environment(AWS, {"AWS_REGION": "us"}, frozen=False)
    assert environment == {"AWS_REGION": "us"}


def test_a_mount_gets_what_it_needs_alone() -> None:
    needs = {**AWS, "PATH": "/bin", "HOME": "/h", "https_proxy": "http://p:1", "NO_PROXY": "a"}
    others = {"HF_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "0", "WANDB_API_KEY": "x", "PYTHONPATH": "p"}
    frozen = {"LD_LIBRARY_PATH": "/agent", "LD_LIBRARY_PATH_ORIG": "/site"}
    base = {**needs, **others, **frozen}
    environment = child_environment(base, {"AWS_REGION": "us"}, frozen=True, kind="mount")
    assert environment == {**needs, "AWS_REGION": "us", "LD_LIBRARY_PATH": "/site"}


def test_a_worker_shares_the_frozen_folder_but_no_secrets() -> None:
    secrets = {"ASYNCGRPO_JOIN": "x", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    base = FROZEN | secrets
    assert child_environment(base, {}, frozen=True, kind="worker") == FROZEN


def test_an_engine_is_confined_to_its_gpus() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "0,1"}
    environment = child_environment(base, {"CUDA_VISIBLE_DEVICES": "2"}, frozen=False, gpus="3")
    assert environment == {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_what_engines_compile_is_kept_where_the_agent_says_unless_the_user_does() -> None:
    base = {"TRITON_CACHE_DIR": "/mine"}
    environment = child_environment(base, {}, frozen=False, caches="/state/cache")
    assert environment["TRITON_CACHE_DIR"] == "/mine"
    assert environment["VLLM_CACHE_ROOT"] == "/state/cache/vllm"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/state/cache/inductor"


def test_secrets_are_known_by_their_names() -> None:
    found = secret_values(
        {
            "HF_TOKEN": "hf_planted",
            "AWS_SECRET_ACCESS_KEY": "hf_planted-and-longer",
            "SHORT_KEY": "on",
            "PATH": "/usr/bin:/bin",
        }
    )
    assert found == ["hf_planted-and-longer", "hf_planted"]

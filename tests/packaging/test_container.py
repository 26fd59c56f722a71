"""packaging/Containerfile, as far as it can be looked at without a container engine."""

from __future__ import annotations

import json
import re
import shlex
import subprocess  # noqa: TID251 - sed is run
from pathlib import Path

from asyncgrpo_agent.config.keys import KEYS, variable_of
from asyncgrpo_agent.flags import Parser, add_config_flags

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "packaging" / "Containerfile").read_text()
IGNORED = (ROOT / "packaging" / "Containerfile.dockerignore").read_text().splitlines()
KNOWN = {"ARG", "FROM", "COPY", "ENV", "WORKDIR", "ENTRYPOINT", "STOPSIGNAL", "CMD", "RUN"}
OWN = {"ASYNCGRPO_STATE_DIR"}


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in whole.splitlines() if line.strip()]
    return [(word, re.sub(r" +", " ", rest)) for word, _, rest in found]


def of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_every_line_is_an_instruction() -> None:
    assert {word for word, _ in instructions()} == KNOWN
    assert [word for word, _ in instructions()][:2] == ["ARG", "FROM"]


def test_the_image_is_that_of_the_vllm_which_is_tested() -> None:
    (argument,) = of("ARG")
    lock = (ROOT / "build/requirements/engine-cuda.lock").read_text()
    (version,) = re.findall(r"^vllm==(\S+)", lock, re.M)
    assert argument == f"VLLM_VERSION=v{version}"
    stages = of("FROM")
    assert stages[0] == "vllm/vllm-openai:${VLLM_VERSION} AS agent"
    names = [stage.split(" AS ")[1] for stage in stages]
    assert [stage.split(" AS ")[0] for stage in stages[1:]] == ["agent", "agent"]
    assert names == ["agent", "replica", "trainer"]


def test_what_is_copied_is_made_by_the_build_and_sent_along() -> None:
    sources = [rest.split()[0] for rest in of("COPY")]
    assert sources == ["dist/debian11/onedir", "build/requirements/engine-cuda.lock"]
    assert [f"!{source}" for source in sources] == IGNORED[1:]
    assert (ROOT / sources[1]).is_file()
    assert "agent=$dist/${2:?debian11}/onedir" in (ROOT / "scripts/package").read_text()


def test_its_variables_are_keys() -> None:
    names = [
        word.partition("=")[0]
        for rest in of("ENV")
        for word in shlex.split(rest)
        if word.startswith("ASYNCGRPO_")
    ]
    known = {variable_of(f"{section}.{key}") for section, keys in KEYS.items() for key in keys}
    assert set(names) - known - OWN == set()
    assert len(names) == 3


def test_the_agent_is_the_first_process_and_its_flags_are_flags() -> None:
    (entry,) = of("ENTRYPOINT")  # the exec form: no shell stands between
    assert json.loads(entry) == ["/opt/asyncgrpo-agent/asyncgrpo-agent"]
    parser = Parser("container", "container", "")
    add_config_flags(parser)
    roles = [parser.parse_args(json.loads(words)).role for words in of("CMD")]
    assert roles == ["replica", "trainer"]
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_it_needs_neither_systemd_nor_fuse() -> None:
    said = " ".join(rest for _, rest in instructions()).lower()
    assert not any(word in said for word in ("systemd", "fuse", "privileged", "tini"))


def test_the_lock_becomes_constraints() -> None:
    """The RUN line's own sed, on the lock."""
    (run,) = of("RUN")
    (script,) = re.findall(r"sed '([^']+)'", run)
    lock = ROOT / "build/requirements/engine-cuda.lock"
    said = subprocess.run(["sed", script, lock], capture_output=True, text=True, check=True).stdout
    pins = [line for line in said.splitlines() if not line.startswith("#")]
    assert len(pins) > 200
    assert all(re.fullmatch(r"[a-z0-9.-]+==[^ \\]+", pin) for pin in pins), pins[:3]

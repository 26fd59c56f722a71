from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.log_rate import CHILD_BURST_BYTES, CHILD_BYTES_PER_S
from asyncgrpo_agent.procs import output
from asyncgrpo_agent.procs.output import MAX_LINE_CHARS, Lines, LogFile, Output


def test_lines_are_cut_at_any_line_end() -> None:
    lines = Lines()
    assert lines.feed(b"one\r\ntwo\rth") == ["one", "two"]
    assert lines.feed(b"ree\n\n") == ["three"]
    assert lines.feed(b"rest", final=True) == ["rest"]


def test_character_split_between_reads_is_one_character() -> None:
    first, second = "pi \u03c0\n".encode()[:4], "pi \u03c0\n".encode()[4:]
    lines = Lines()
    assert lines.feed(first) + lines.feed(second) == ["pi \u03c0"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert Lines().feed(b"a\xff\n") == ["a\ufffd"]


def test_endless_line_is_given_once_and_cut() -> None:
    lines = Lines()
    found = [line for _ in range(5) for line in lines.feed(b"x" * MAX_LINE_CHARS)]
    found += lines.feed(b"end\nnext\n")
    assert found == ["x" * MAX_LINE_CHARS + " [cut]", "next"]


@given(st.binary(max_size=200), st.integers(1, 7))
def test_chunking_does_not_matter(data: bytes, size: int) -> None:
    whole, parts = Lines(), Lines()
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    in_parts = [line for chunk in chunks for line in parts.feed(chunk)]
    assert in_parts + parts.feed(b"", final=True) == whole.feed(data, final=True)


def test_full_log_file_is_rotated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LOG_BYTES", 10)
    file = LogFile(tmp_path / "logs/vllm.log")
    for text in ("first line\n", "second line\n", "third\n"):
        file.write(text)
    file.close()
    assert (tmp_path / "logs/vllm.log").read_text() == "third\n"
    assert (tmp_path / "logs/vllm.log.1").read_text() == "second line\n"
    assert (tmp_path / "logs/vllm.log").stat().st_mode & 0o777 == 0o600


async def test_slow_listener_loses_lines_and_delays_nothing() -> None:
    heard: list[str] = []
    taken = Output("vllm", on_line=heard.append, log_file=None)
    taken.feed(b"".join(b"%d\n" % number for number in range(5000)))  # nobody listens yet
    taken.close()
    await taken.deliver()
    assert heard == [str(number) for number in range(1000)]
    assert taken.tail().splitlines() == [str(number) for number in range(4950, 5000)]


async def test_last_lines_arrive_although_the_listener_is_cancelled() -> None:
    heard: list[str] = []
    taken = Output("vllm", on_line=heard.append, log_file=None)
    with trio.CancelScope() as scope:
        scope.cancel()
        taken.feed(b"bye\n")
        taken.close()
        await taken.deliver()
    assert heard == ["bye"]


async def test_log_file_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    taken = Output("vllm", on_line=None, log_file=tmp_path / "file/vllm.log")
    taken.feed(b"one\n")
    taken.feed(b"two\n")
    taken.close()
    assert taken.tail() == "one\ntwo"


async def test_secrets_are_in_no_line_that_leaves(tmp_path: Path) -> None:
    heard: list[str] = []
    file = tmp_path / "vllm.log"
    secrets = ("hf_planted-and-longer", "hf_planted")
    taken = Output("vllm", on_line=heard.append, log_file=file, secrets=secrets)
    taken.feed(b"token hf_plan")
    taken.feed(b"ted-and-longer!\njoin agrpo1.AbCdEfGhIjKlMnOpQrSt\nvia https://me:pass@host/x\n")
    taken.close()
    await taken.deliver()
    assert heard == ["token ***!", "join ***", "via https://***@host/x"]
    assert file.read_text().splitlines() == heard == taken.tail().splitlines()


async def test_a_child_that_writes_without_end_fills_no_log(tmp_path: Path) -> None:
    now_s, heard = 0.0, list[str]()
    file = tmp_path / "vllm.log"
    taken = Output("vllm", on_line=heard.append, log_file=file, clock=lambda: now_s)
    line = b"x" * 1023 + b"\n"
    for _ in range(30):  # half a minute, 4 MiB a second
        taken.feed(line * 4096)
        now_s += 1.0
    taken.feed(b"the end\n")
    taken.close()
    most_bytes = CHILD_BURST_BYTES + 30 * CHILD_BYTES_PER_S
    text = file.read_text()
    assert CHILD_BURST_BYTES < len(text) <= most_bytes + 4096
    gaps = re.findall(r"^\[(\d+) lines, (\d+) bytes left out: too many\]$", text, re.MULTILINE)
    assert 1 < len(gaps) < 12
    assert text.count("\n") - len(gaps) + sum(int(lines) for lines, _ in gaps) == 30 * 4096 + 1
    assert taken.tail(1) == "the end"


async def test_what_was_left_out_is_told_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "vllm.log"
    taken = Output("vllm", on_line=None, log_file=file, clock=lambda: 0.0)
    taken.feed((b"x" * 1023 + b"\n") * 5000)
    taken.close()
    taken.close()
    assert file.read_text().endswith("\n[904 lines, 925696 bytes left out: too many]\n")

import json
import logging
import subprocess  # noqa: TID251 - a crash ends a process
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent import logs
from asyncgrpo_agent.core.log_rate import PEER_BURST, WINDOW_S
from asyncgrpo_agent.logs import Gate, LineFormatter, Log

log = Log("asyncgrpo_agent.test")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def boom() -> Exception:
    return ValueError("boom")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_is_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(as_json=False, level="INFO")
    log.info("link.up", proxy="a:1", rtt_ms=1.23456789, n=3, ok=True)
    assert lines(capsys) == ["INFO link.up proxy=a:1 rtt_ms=1.235 n=3 ok=True"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("two words", '"two words"'), ("", '""'), ("a=b", '"a=b"'), ("a\nb", '"a\\nb"'), ("é", "é")],
)
def test_awkward_values_are_quoted_and_stay_on_one_line(
    capsys: pytest.CaptureFixture[str], value: str, shown: str
) -> None:
    logs.set_up(as_json=False, level="INFO")
    log.warning("x.y", value=value)
    assert lines(capsys) == [f"WARNING x.y value={shown}"]


def test_json_lines_have_time_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(as_json=True, level="INFO")
    log.error("adapter.refused", reason="cut\nshort", version=7)
    (line,) = lines(capsys)
    entry = json.loads(line)
    assert isinstance(entry.pop("time"), float)
    assert entry == {
        "level": "ERROR",
        "event": "adapter.refused",
        "reason": "cut\nshort",
        "version": 7,
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_tracebacks_are_kept(
    capsys: pytest.CaptureFixture[str], boom: Exception, as_json: bool
) -> None:
    logs.set_up(as_json=as_json, level="INFO")
    try:
        raise boom
    except ValueError:
        logging.getLogger("other").exception("child.lost")
    text = capsys.readouterr().err
    assert "child.lost" in text
    assert "ValueError: boom" in text
    assert len(text.splitlines()) == 1 or not as_json


def test_levels_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(as_json=False, level="WARNING")
    log.debug("a.b")
    log.info("a.b")
    log.warning("c.d")
    assert lines(capsys) == ["WARNING c.d"]


def test_libraries_that_print_header_values_are_kept_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.set_up(as_json=False, level="DEBUG")
    for name in ("h2.connection", "hpack.hpack", "httpcore.http11", "watchfiles.main"):
        logging.getLogger(name).info("authorization: secret")
    log.debug("a.b")
    assert lines(capsys) == ["DEBUG a.b"]


def test_set_up_twice_writes_once(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(as_json=False, level="INFO")
    logs.set_up(as_json=True, level="INFO")
    assert len(root_logger.handlers) == 1
    log.info("a.b")
    assert len(lines(capsys)) == 1
    assert logs.recent()[-1].endswith("INFO a.b")


@pytest.mark.parametrize("as_json", [False, True])
def test_what_an_error_quotes_of_a_secret_is_hidden(
    as_json: bool, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(as_json=as_json, level="INFO")
    join = "agrpo1.AbCdEfGhIjKlMnOpQrStUvWxYz-_"
    try:
        raise ValueError(f"bad line {join}")
    except ValueError:
        Log("x").exception("link.lost", proxy="http://me:pa55word@host:1/", file="s3://bucket/a@b")
    shown = capsys.readouterr().err
    assert "AbCdEfGh" not in shown
    assert "pa55word" not in shown
    assert "s3://bucket/a@b" in shown


@pytest.fixture
def held() -> Iterator[str]:
    """A secret of this process that looks like nothing."""
    before, secret = list(logs._held), "correct horse battery"
    logs.hide(secret, "on")
    yield secret
    logs._held[:] = before


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("got correct horse battery!", "got ***!"),
        ("is on", "is on"),
        ("hf_0123456789abcdefXYZ, x", "***, x"),
        ("key AKIAABCDEFGHIJKLMNOP", "key ***"),
        ("Authorization: Bearer abcDEF123456", "Authorization: Bearer ***"),
        ("?X-Amz-Signature=12ab&x=1", "?X-Amz-***&x=1"),
        ("WANDB_API_KEY=abcdef HF_TOKEN=x12345", "WANDB_API_KEY=*** HF_TOKEN=***"),
        ("token=ab12cd tokens=512 key=r/1", "token=ab12cd tokens=512 key=r/1"),
    ],
)
def test_free_text_is_shown_without_secrets(held: str, text: str, shown: str) -> None:
    assert logs.without_secrets(text) == shown


CRASH = """
import sys
from asyncgrpo_agent import logs
logs.set_up(as_json=False, level="INFO")
logs.hide(sys.stdin.read())
try:
    raise KeyError("correct horse battery")
except KeyError as error:
    raise ExceptionGroup("all", [ValueError("via http://me:pa55word@h/")]) from error
"""


def test_a_crash_shows_no_secret() -> None:
    words = [sys.executable, "-c", CRASH]
    ended = subprocess.run(
        words,
        input="correct horse battery",
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(logs.__file__).parent.parent)},
    )
    assert ended.returncode == 1
    assert "KeyError: '***'" in ended.stderr
    assert "ValueError: via http://***@h/" in ended.stderr


# --- lines that peers cause ------------------------------------------------------------------


class Kept(logging.Handler):
    """The lines that come through a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.told = threading.Event()
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        if "suppressed=" in self.lines[-1]:
            self.told.set()


@pytest.fixture
def now() -> list[float]:
    """The time of a gate's clock, to be set."""
    return [0.0]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def gate(root_logger: logging.Logger, kept: Kept, now: list[float]) -> Iterator[Gate]:
    made = Gate([kept], clock=lambda: now[0])
    root_logger.handlers[:] = [made]
    root_logger.setLevel("DEBUG")
    yield made
    made.close()


def flood(lines: int) -> None:
    for port in range(lines):
        log.warning("replica.duplicate", replica="r1", peer=f"192.0.2.1:{port}")


def test_a_flood_by_one_peer_is_cut_and_counted(gate: Gate, kept: Kept, now: list[float]) -> None:
    flood(PEER_BURST + 900)
    assert len(kept.lines) == PEER_BURST
    log.info("replica.joined", peer="192.0.2.1:9")  # another event
    log.warning("replica.duplicate", peer="192.0.2.2:9")  # another peer
    assert len(kept.lines) == PEER_BURST + 2
    now[0] = WINDOW_S
    gate.tell_due()
    assert kept.lines[-1] == "WARNING replica.duplicate suppressed=900 peers=1 peer=192.0.2.1"
    gate.tell_due()
    assert len(kept.lines) == PEER_BURST + 3


def test_the_count_is_told_when_nothing_else_is_logged(
    kept: Kept, root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncgrpo_agent.core.log_rate.WINDOW_S", 0.05)
    root_logger.handlers[:] = [Gate([kept])]
    flood(PEER_BURST + 10)
    assert kept.told.wait(20)
    assert "suppressed=10 " in kept.lines[-1]


def test_errors_held_back_are_told_as_errors_at_the_end(gate: Gate, kept: Kept) -> None:
    flood(PEER_BURST)
    log.error("replica.duplicate", peer="192.0.2.1:1")
    gate.close()
    assert kept.lines[-1] == "ERROR replica.duplicate suppressed=1 peers=1 peer=192.0.2.1"


def test_who_debugs_sees_all(gate: Gate, kept: Kept) -> None:
    for _ in range(3000):
        log.debug("adapters.step")
    assert len(kept.lines) == 3000


def test_words_in_texts_of_libraries_make_no_events(gate: Gate, kept: Kept) -> None:
    for number in range(5000):
        logging.getLogger("other").warning("a peer said %d", number)
    assert len(kept.lines) <= 1001
    gate.close()
    assert kept.lines[-1].startswith("WARNING other suppressed=4")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_field_has_a_limit(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    logs.set_up(as_json=as_json, level="INFO")
    log.info("adapter.put_off", reason="x" * 1_000_000, more=["y"] * 1_000_000)
    assert len(capsys.readouterr().err) < 3 * logs.MAX_VALUE_CHARACTERS

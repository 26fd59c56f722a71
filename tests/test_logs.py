import json
import logging
from collections.abc import Iterator

import pytest

from asyncgrpo_agent import logs
from asyncgrpo_agent.logs import Log

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


def test_set_up_twice_writes_once(root_logger: logging.Logger) -> None:
    logs.set_up(as_json=False, level="INFO")
    logs.set_up(as_json=True, level="INFO")
    writing = [h for h in root_logger.handlers if isinstance(h, logging.StreamHandler)]
    assert len(writing) == 1
    assert len(root_logger.handlers) == 2  # and the newest lines, for a dump


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

"""HTTP/2 clients that are not ours, against the real listener: curl, nghttp and h2load."""

from __future__ import annotations

import re
import shutil
import subprocess  # noqa: TID251 - the tools are the peers under test
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.link_server import LARGE
from fakes.server_process import ServerProcess, serving

# A tool that hangs ends a test here. Far above what any takes: on a machine that is busy with other
# work, h2load's 160 MB take over a minute.
TIMEOUT_S = 200


def has(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


@pytest.fixture(scope="module", params=["stranger", "known"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One that treats its peers as strangers, who get a stream at a time, or as known agents."""
    flags = ["--known"] if request.param == "known" else []
    with serving(tmp_path_factory.mktemp("server"), *flags) as process:
        yield process
        log = process.log.read_text()
        assert not re.search("ERROR|Traceback|broke the protocol|stream.failed", log), log


@pytest.fixture(scope="module")
def known_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server"), "--known") as process:
        yield process


def run(*words: str | Path) -> bytes:
    return subprocess.run(words, check=True, capture_output=True, timeout=TIMEOUT_S).stdout


def curl(server: ServerProcess, *words: str | Path) -> bytes:
    return run("curl", "-sS", "--fail", "--http2", "--cacert", server.ca, *words)


def url(server: ServerProcess, path: str) -> str:
    return f"https://localhost:{server.port}{path}"


@has("curl")
def test_curl_gets(server: ServerProcess) -> None:
    answer = curl(server, url(server, "/health"), "-w", "%{http_version} %{http_code}")
    assert answer == b"ok\n2 200"


@has("curl")
def test_curl_posts_a_megabyte(server: ServerProcess, tmp_path: Path) -> None:
    body = bytes(range(256)) * 4096
    (tmp_path / "body").write_bytes(body)
    posted = ("--data-binary", f"@{tmp_path / 'body'}")
    assert curl(server, *posted, url(server, "/echo")) == body


@has("curl")
def test_curl_gets_five_megabytes(server: ServerProcess) -> None:
    assert curl(server, url(server, "/large")) == LARGE


@has("curl")
def test_curl_in_parallel(server: ServerProcess) -> None:
    common = ["-sS", "--fail", "--http2", "--cacert", str(server.ca)]
    common += ["-w", " connects=%{num_connects} "]
    words = ["--parallel", "--parallel-max", "20"]
    for number in range(20):
        words += [*common, "--data", f"body={number}", url(server, "/echo"), "--next"]
    answer = run("curl", *words[:-1]).decode()
    assert sorted(map(int, re.findall(r"body=(\d+)", answer))) == list(range(20))
    connections = sum(map(int, re.findall(r"connects=(\d+)", answer)))
    assert connections == 1 or "--known" not in server.flags  # a stranger has one stream on each


@has("nghttp")
def test_nghttp_shows_the_frames(server: ServerProcess) -> None:
    shown = run("nghttp", "-v", url(server, "/health")).decode()
    assert "The negotiated protocol: h2" in shown
    assert "recv SETTINGS frame" in shown
    assert ":status: 200" in shown
    assert "recv GOAWAY" not in shown


@has("nghttp")
def test_nghttp_asks_for_several_at_once(known_server: ServerProcess) -> None:
    urls = [url(known_server, path) for path in ("/health", "/large")]
    shown = run("nghttp", "-s", "-n", "-m", "5", *urls)  # it does not wait for our SETTINGS
    assert len(re.findall(rb" 200 +\S+ /", shown)) == 10


H2LOADS = {
    "small": ["-n", "2000", "-c", "4", "-m", "32"],
    "large": ["-n", "32", "-c", "4", "-m", "8"],
}


@has("h2load")
@pytest.mark.slow
@pytest.mark.parametrize("load", ["small", "large"])
def test_h2load(known_server: ServerProcess, tmp_path: Path, load: str) -> None:
    words = H2LOADS[load]
    target = url(known_server, "/large")
    if load == "small":
        (tmp_path / "body").write_bytes(b"x" * 1500)
        words = [*words, f"--data={tmp_path / 'body'}"]
        target = url(known_server, "/echo")
    shown = run("h2load", *words, target).decode()
    number = words[1]
    assert f"{number} succeeded, 0 failed, 0 errored, 0 timeout" in shown
    assert "Application protocol: h2" in shown

"""Dashboard and rules ask for what the agents show, and Prometheus itself can read that."""

from __future__ import annotations

import json
import re
import shutil
import subprocess  # noqa: TID251 - Prometheus' own judge is asked, and Prometheus itself
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import trio

from asyncgrpo_agent.store import tokens
from fakes import fleet
from fakes.certificates import authority
from fakes.scraped import every_scrape, series_in

PACKAGING = Path(__file__).parents[2] / "packaging"
PROMETHEUS = PACKAGING / "prometheus"
RULES = (PROMETHEUS / "alerts.yml").read_text()
DASHBOARD = (PACKAGING / "grafana" / "asyncgrpo.json").read_text()
OF_PROMETHEUS = {"up"}
ADDED_BY_PROMETHEUS = {"job", "instance"}


def promtool(*words: str, folder: Path, given: bytes = b"") -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    argv = ["promtool", *words]
    done = subprocess.run(argv, input=given, capture_output=True, cwd=folder)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def expressions_of_rules() -> list[str]:
    """Without a YAML parser: an expression is one line, or folded with a deeper indent."""
    found = re.findall(r"^        expr: (?:>-\n((?: {10}.*\n)+)|(.*)\n)", RULES, re.MULTILINE)
    return [" ".join((folded or plain).split()) for folded, plain in found]


def expressions_of_dashboard() -> list[str]:
    panels = json.loads(DASHBOARD)["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    variables = json.loads(DASHBOARD)["templating"]["list"]
    queries = [one["definition"] for one in variables if one["type"] == "query"]
    asked = [re.sub(r"label_values\((\w+), (\w+)\)", r'\1{\2=""}', query) for query in queries]
    return [*found, *asked]


def names_in(expression: str) -> list[tuple[str, set[str]]]:
    """Metrics with the labels that are asked for."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    found = re.findall(r"\b((?:asyncgrpo|process)_\w+|up\b)(?:\{([^}]*)\})?", plain)
    return [(name, set(re.findall(r"(\w+)=", labels))) for name, labels in found]


@pytest.fixture
async def scrapes(tmp_path: Path, nursery: trio.Nursery) -> dict[str, bytes]:
    return await every_scrape(tmp_path / "state", nursery)


async def test_all_that_is_asked_for_is_shown(scrapes: dict[str, bytes]) -> None:
    shown: dict[str, set[str]] = {}
    for text in scrapes.values():
        for name, labels in series_in(text):
            shown.setdefault(name, set()).update(key for key, _ in labels)
    rules, panels = expressions_of_rules(), expressions_of_dashboard()
    assert len(rules) == RULES.count("alert: ")
    assert len(panels) > 30
    asked = [one for expression in (*rules, *panels) for one in names_in(expression)]
    assert len(asked) > 60
    for name, wanted in asked:
        if name not in OF_PROMETHEUS:
            assert name in shown, name
            assert wanted <= shown[name] | ADDED_BY_PROMETHEUS, (name, wanted)


async def test_no_two_roles_show_the_same_series(scrapes: dict[str, bytes]) -> None:
    """They may be in one process, as with train.embed_proxy."""
    proxy, trainer = (series_in(scrapes[role]).keys() for role in ("proxy", "trainer"))
    assert {name for name, _ in proxy & trainer if not name.startswith("process_")} == set()


async def test_promtool_finds_no_fault_with_what_is_shown(
    scrapes: dict[str, bytes], tmp_path: Path
) -> None:
    for text in scrapes.values():
        assert promtool("check", "metrics", folder=tmp_path, given=text) == ""


def test_promtool_takes_the_rules_and_they_fire(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", "alerts.yml", folder=PROMETHEUS)
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml", folder=PROMETHEUS)


def test_promtool_takes_the_example_of_a_configuration(tmp_path: Path) -> None:
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "viewer.join").write_text("agrpo1.x\n")
    (tmp_path / "ca.pem").write_bytes(authority()[0])
    assert "SUCCESS" in promtool("check", "config", "scrape.yml", folder=tmp_path)


def test_promtool_can_read_every_panel(tmp_path: Path) -> None:
    """Each as a rule of its own: the judge has no other way to look at an expression."""
    rules = [
        {"record": f"panel:{number}", "expr": one.replace("$__rate_interval", "1m")}
        for number, one in enumerate(expressions_of_dashboard())
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "x", "rules": rules}]}))
    said = promtool("check", "rules", "panels.yml", folder=tmp_path)
    assert f"{len(rules)} rules found" in said


def until_scraped(address: str, job: str, patience_s: float = 30.0) -> dict[str, Any]:
    """The target, once Prometheus has scraped it."""
    deadline = time.monotonic() + patience_s
    while True:
        found: dict[str, Any] = {}
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/targets", timeout=5) as answer:
                targets = json.load(answer)["data"]["activeTargets"]
            found = next((one for one in targets if one["labels"]["job"] == job), {})
        except OSError:  # it is starting
            pass
        if found.get("health", "unknown") != "unknown":
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)  # noqa: TID251 - other processes have no virtual clock


@pytest.mark.slow
def test_prometheus_scrapes_a_proxy_with_a_viewers_token(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    with fleet.site(tmp_path) as site:
        local, web = fleet.free_address(), fleet.free_address()
        site.proxy(f"--set=telemetry.listen={local}")
        site.join_file("viewer", "viewer.join")
        shutil.copy(tmp_path / "proxy" / "proxy" / "ca.pem", tmp_path / "ca.pem")
        shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
        example = (PROMETHEUS / "scrape.yml").read_text()
        example = example.replace("proxy.example.org:7843", site.address)
        example = example.replace("127.0.0.1:9464", local).replace("15s", "1s")
        (tmp_path / "scrape.yml").write_text(example)
        site.hosts.run(
            "prometheus",
            [
                *("prometheus", "--config.file=scrape.yml", f"--web.listen-address={web}"),
                f"--storage.tsdb.path={tmp_path}/tsdb",
            ],
        )
        for job in ("asyncgrpo-proxy", "asyncgrpo-agents"):
            target = until_scraped(web, job)
            assert (target["health"], target["lastError"]) == ("up", ""), target
        facts = tokens.list_tokens(tmp_path / "proxy")
        assert next(one for one in facts if one.role == "viewer").last_used_unix_s is not None

from __future__ import annotations

import re
from html.parser import HTMLParser

from asyncgrpo_agent.report.figures import figures
from asyncgrpo_agent.report.page import page
from asyncgrpo_agent.report.run import Run
from fakes.histories import simulated

_VOID = {"meta", "polyline", "polygon", "circle"}


class Checked(HTMLParser):
    """Every tag is closed in its turn; what asks for anything else is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asks += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "onclick")]
        self.asks += [tag] if tag in ("script", "link", "img", "iframe", "object") else []
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


def checked(html: str) -> Checked:
    found = Checked()
    found.feed(html)
    assert found.open == []
    return found


def written(*records: dict[str, object], steps: int = 60) -> str:
    run = Run()
    run.add_all([*simulated(steps, resume_at=steps // 2), *records])
    return page(run, figures(run), made="Made by a test.")


def test_a_page_asks_for_nothing_and_is_whole() -> None:
    html = written()
    assert checked(html).asks == []
    assert not re.search(r"url\(|@import|https?://", html)
    assert "default-src 'none'" in html
    assert html.count("<figure>") == html.count("<svg ") == 15
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    for text in ("Run demo", "Figure 15.", "Starts of the trainer", "Settings", "Made by a test."):
        assert text in html


def test_what_others_wrote_is_text() -> None:
    evil = "<script>alert(1)</script>"
    html = written(
        {"t": 2e9, "kind": "replica", "name": evil, "state": "GONE", "reason": evil},
        {"t": 2e9, "kind": "eval", "when": evil, "name": evil, "accuracy": 0.5, "samples": evil},
        {"t": 2e9, "kind": "about", "run": evil, "model": evil, "settings": {evil: evil}},
        {"t": 2e9, "kind": "ended", "ok": False, "reason": evil},
    )
    assert "<script" not in html
    assert checked(html).asks == []


def test_numbers_that_are_none_cost_no_report() -> None:
    inf = float("inf")
    adapter = "demo.a0001-5d9b.v000003.0123456789ab"
    html = written(
        {"t": inf, "kind": "metrics", "step": 70, "values": {"reward": inf, "kl": 10**400}},
        {"t": 1e300, "kind": "metrics", "step": inf, "values": {}},
        {"t": 2e9, "kind": "metrics", "step": 10**12, "values": {"reward": 1.0}},
        {"t": 2e9, "kind": "eval", "when": "x", "step": 3, "accuracy": inf, "samples": 1},
        {"t": 2e9, "kind": "sync", "adapter": adapter, "seconds": inf, "bytes": 1, "phases_s": {}},
        {"t": 2e9, "kind": "totals", "replicas": [], "rollouts": 3, "held_s": inf},
    )
    checked(html)


def test_every_ink_has_a_colour_in_every_mode() -> None:
    html = written()
    used = set(re.findall(r'class="[saf]-(\w+)"', html))
    rules = set(re.findall(r"\.[saf]-(\w+) \{", html))
    assert used <= rules
    for ink in rules - {"guide"}:
        assert html.count(f"--{ink}: #") == 3 or ink in ("muted", "grid", "axis", "text"), ink


def test_a_run_that_logged_nothing() -> None:
    html = page(Run(name="empty"), [], made="x")
    checked(html)
    assert "No step was logged." in html
    assert "Too few steps" in html

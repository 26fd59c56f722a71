"""Tools and environments by name, described as a model needs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("trl")

from transformers import AutoTokenizer  # noqa: E402

from asyncgrpo_engine import named, tools  # noqa: E402

DEMO = Path(__file__).parents[2] / "scripts" / "demo_task"
DOC = '''"""Add.

    Args:
        a: One number.
        b: Another.
    """'''
SOURCE = f"""
def add(a: int, b: int) -> int:
    {DOC}
    return a + b
def bare(a, b):
    return a + b
class Counter:
    def reset(self, **row): self.total = 0
    def add(self, a: int, b: int) -> int:
        {DOC}
        return a + b
    def get_reward(self) -> float: return 1.0
class Plain:
    def add(self, a: int, b: int) -> int:
        {DOC}
        return a + b
class Wanting(Counter):
    def __init__(self, url): self.url = url
def make(): return Counter()
def fails(): raise OSError("no server")
class Object:
    def __call__(self): return 1
thing = Object()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_tools.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    named.extend_path([str(tmp_path)])
    monkeypatch.delitem(sys.modules, "some_tools", raising=False)


def test_a_tool_and_an_environment() -> None:
    found, problems = tools.load(["some_tools:add"], "some_tools:Counter", {})
    assert problems == []
    assert [tool.__name__ for tool in found.tools] == ["add"]
    assert found.environment_factory.__name__ == "Counter"
    assert found.gives_rewards
    assert not found.is_empty


def test_several_environments() -> None:
    found, problems = tools.load([], "", {"count": "some_tools:make", "sum": "some_tools:Counter"})
    assert problems == []
    assert list(found.environment_factory) == ["count", "sum"]
    assert tools.load([], "", {})[0].is_empty


@pytest.mark.parametrize(
    ("name", "factory", "what"),
    [
        ("some_tools:bare", "", "bare"),
        ("some_tools:thing", "", "no function"),
        ("", "some_tools:Plain", "has no method reset"),
        ("", "some_tools:fails", "OSError: no server"),
        ("", "some_tools:Wanting", "missing a required argument: 'url'"),
        ("", "some_tools:missing", "has no function 'missing'"),
    ],
)
def test_what_trl_could_not_use(name: str, factory: str, what: str) -> None:
    _, (problem,) = tools.load([name] if name else [], factory, {})
    assert what in problem.what
    assert (name or factory) in problem.where
    assert problem.fix


def test_a_template_without_a_place_for_tools() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO / "model"))
    assert tools.template_problems(tokenizer, "m") == []
    tokenizer.chat_template = "{{ messages[0].content }}"
    (problem,) = tools.template_problems(tokenizer, "m")
    assert "no place for tools" in problem.what

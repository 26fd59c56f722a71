"""Code that a job names: found, callable, picklable, or told what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncgrpo_engine import named
from asyncgrpo_engine.problems import Problem

SOURCE = """
class Stuck:
    def __reduce__(self): raise TypeError("stays here")
    def __call__(self, **columns): return [1]
def one(completions, **columns): return [1 for _ in completions]
def _hidden(): pass
stuck = Stuck()
nothing = 3
local = lambda **columns: [0]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_code.py").write_text(SOURCE)
    (tmp_path / "broken_code.py").write_text("1 / 0")
    (tmp_path / "a_script.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "a_folder").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    named.extend_path([str(tmp_path)])
    for name in ("some_code", "broken_code", "a_script", "a_folder"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_function() -> None:
    found = named.load("some_code:one", "train.rewards")
    assert not isinstance(found, Problem)
    assert found(completions=["a"]) == [1]


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("some_code", "not a name", "write module:function"),
        (":one", "not a name", "write module:function"),
        ("no_such_module:one", "ModuleNotFoundError", "train.python_path"),
        ("broken_code:one", "ZeroDivisionError", "train.python_path"),
        ("a_script:one", "SystemExit: 0", "train.python_path"),
        ("a_folder:one", "module a_folder has no function 'one'", "define it there"),
        ("sys:one", "module sys has no function 'one'", "define it there"),
        ("some_code:two", "has no function 'two'", "it has local, one"),
        ("some_code:nothing", "has no function 'nothing'", "it has local, one"),
        ("some_code:stuck", "stays here", "module level"),
        ("some_code:local", "lambda", "module level"),
    ],
)
def test_names_that_do_not_work(name: str, what: str, fix: str) -> None:
    problem = named.load(name, f"train.tools {name!r}")
    assert isinstance(problem, Problem)
    assert what in problem.what
    assert fix in problem.fix
    assert problem.where == f"train.tools {name!r}"

"""What a job names as "module:attribute": found, callable, and picklable.

TRL's rollout process gets rewards, tools and environments pickled by module and name, so whatever
is loaded here has to be found there again.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

from asyncgrpo_engine.problems import Problem, from_exception

Named = Callable[..., Any]


def extend_path(folders: Iterable[str]) -> None:
    """Put `folders` first on the import path. A spawned process inherits the path."""
    for folder in reversed(list(folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def load(name: str, where: str) -> Named | Problem:
    """The object named "module:attribute", or why there is none. `where` is the key and its value.

    The attribute has to be callable.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        return Problem(what="not a name", where=where, fix="write module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or be a script
        fix = "name its folder in train.python_path, and install what it imports"
        return from_exception(error, where=where, fix=fix)
    found = getattr(module, attribute, None)
    if not callable(found):
        return Problem(
            what=f"{_place(module)} has no function {attribute!r}",
            where=where,
            fix=_offer(module),
        )
    try:
        pickle.dumps(found)
    except Exception as error:  # pickling runs the object's own code
        return from_exception(error, where=where, fix="define it with def at module level")
    named: Named = found
    return named


def _place(module: Any) -> str:
    """Its file; what is built in, or a folder without __init__.py, has none."""
    return getattr(module, "__file__", None) or f"module {module.__name__}"


def _offer(module: Any) -> str:
    names = [
        name
        for name, member in inspect.getmembers(module, inspect.isfunction)
        if member.__module__ == module.__name__ and not name.startswith("_")
    ]
    return f"it has {', '.join(names)}" if names else "define it there"

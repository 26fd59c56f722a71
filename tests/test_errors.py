import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from asyncgrpo_agent import errors
from asyncgrpo_agent.errors import AgentError


def tree(base: type[AgentError]) -> Iterator[type[AgentError]]:
    yield base
    for child in base.__subclasses__():
        yield from tree(child)


CLASSES = [cls for cls in tree(AgentError) if cls.__module__ == errors.__name__]
EXIT_CODES = {"UsageError": 2, "ConfigError": 78}
RETRYABLE = {
    "LinkClosedError",
    "LinkError",
    "PeerProtocolError",
    "RegistrationRefusedError",
    "StreamResetError",
    "StreamDeadlineError",
    "EngineHangsError",
    "EngineError",
    "BucketUnavailableError",
}
FACTS: dict[str, Any] = {
    "permanent": True,
    "code": 8,
    "safe_to_retry": False,
    "returncode": -9,
    "status": 500,
}


def make(cls: type[AgentError], **options: str) -> AgentError:
    """An instance with whatever its class demands to know."""
    parameters = inspect.signature(cls.__init__).parameters
    facts = {name: FACTS[name] for name in FACTS if name in parameters}
    return cls("it broke", **facts, **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_documented_and_named_an_error(cls: type[AgentError]) -> None:
    assert cls.__doc__
    assert cls.__name__.endswith("Error")


@pytest.mark.parametrize("cls", CLASSES)
def test_exit_codes_and_retries_belong_to_the_class(cls: type[AgentError]) -> None:
    assert cls.exit_code == EXIT_CODES.get(cls.__name__, 1)
    assert cls.retryable == (cls.__name__ in RETRYABLE)


@pytest.mark.parametrize("cls", CLASSES)
def test_texts_say_where_what_and_what_to_do(cls: type[AgentError]) -> None:
    assert str(make(cls)) == "it broke"
    assert str(make(cls, where="host")) == "host: it broke"
    if "fix" in inspect.signature(cls.__init__).parameters:
        assert str(make(cls, where="host", fix="Mend it")) == "host: it broke. Mend it"


@pytest.mark.parametrize("cls", CLASSES)
def test_facts_are_kept(cls: type[AgentError]) -> None:
    error = make(cls)
    for name, value in FACTS.items():
        if name in inspect.signature(cls.__init__).parameters:
            assert getattr(error, name) == value

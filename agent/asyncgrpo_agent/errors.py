"""Every error that a user can meet, in one small tree.

An error says what was wrong, where (host, file, key) and what to do. Whether an operation may be
tried again and which exit code ends the process are properties of the class, so that nothing ever
matches on message text. A class exists only where some caller tells it from its parent.

Broken invariants of our own are AssertionError or RuntimeError and are never caught.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h; the systemd units do not restart on it


class AgentError(Exception):
    """Base of all: `what` went wrong, `where` (host, file, key) and how to `fix` it."""

    exit_code: int = EXIT_FAILURE
    retryable: ClassVar[bool] = False

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.fix}" if self.fix else text


class UsageError(AgentError):
    """The command line cannot be understood."""

    exit_code = EXIT_USAGE


class ConfigError(AgentError):
    """The configuration, or something it points to, cannot work; a restart would not help."""

    exit_code = EXIT_CONFIG


class LinkError(AgentError):
    """The link to the peer cannot be made or was lost."""

    retryable = True


class LinkClosedError(LinkError):
    """The peer said goodbye: the link ended in good order."""


class PeerProtocolError(LinkError):
    """The peer broke the protocol; this connection is closed, others are not touched."""


class RegistrationRefusedError(LinkError):
    """The proxy refused the hello. `permanent`: neither dialling again nor a restart can help."""

    def __init__(
        self,
        what: str,
        *,
        permanent: bool,
        retry_after_s: float = 0.0,
        where: str = "",
        fix: str = "",
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.permanent = permanent
        if permanent:
            self.exit_code = EXIT_CONFIG
        self.retry_after_s = retry_after_s


class StreamResetError(LinkError):
    """One stream ended early. `safe_to_retry`: the request provably did not run."""

    def __init__(self, what: str, *, code: int, safe_to_retry: bool, where: str = "") -> None:
        super().__init__(what, where=where)
        self.code = code
        self.safe_to_retry = safe_to_retry


class StreamDeadlineError(StreamResetError):
    """One stream was ended here, because its peer took longer than the stream's deadlines allow."""


class EngineHangsError(StreamResetError):
    """One stream was ended here, because the engine behind it makes no tokens any more."""


class ChildError(AgentError):
    """A child process failed."""


class ChildExitedError(ChildError):
    """A child ended by itself; `returncode` is negative for a signal, `tail` its last lines."""

    def __init__(
        self, what: str, *, returncode: int, tail: str = "", where: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.returncode = returncode
        self.tail = tail


class ChildNotReadyError(ChildError):
    """A child did not become ready in time."""


class EngineError(AgentError):
    """vLLM answered a request with an error; `status` is its HTTP status, 0 if none came.

    `may_have_run` is False if the request provably never reached it.
    """

    retryable = True

    def __init__(
        self, what: str, *, status: int, may_have_run: bool = True, where: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.status = status
        self.may_have_run = may_have_run


class StoreError(AgentError):
    """The bucket or a local store failed."""


class BucketUnavailableError(StoreError):
    """The bucket cannot be read or written now: dead, hung, unmounted or full."""

    retryable = True


class DeletionForbiddenError(StoreError):
    """The bucket lets nobody, or not this host, remove objects."""


class AdapterRefusedError(StoreError):
    """A commit or adapter is cut, foreign, forged, corrupt or unfit for vLLM; never loaded."""


class AdapterPrunedError(AdapterRefusedError):
    """The trainer has removed it, and there is a newer one: nothing is wrong."""


class AdapterDamagedError(AdapterRefusedError):
    """What was read is not what was committed. It may still be on its way, or be so for good."""

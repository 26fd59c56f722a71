"""Signs of life of a long call, so that whoever waits for it can tell slow from hung.

Every chunk that was read is one. A sync or close of a file says nothing until it is through and
may upload all of the file, so it is announced, with its size.
"""

from __future__ import annotations

from typing import Final


class Heartbeat:
    """Tells nobody; the mount's worker has one that does."""

    def beat(self, size_bytes: int) -> None:
        """`size_bytes` more have been handled."""

    def pause(self, size_bytes: int) -> None:
        """The step that begins now handles `size_bytes` without a sign."""


SILENT: Final = Heartbeat()

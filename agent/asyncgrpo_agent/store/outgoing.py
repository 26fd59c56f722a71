"""An adapter on its way out over a link: its commit, and its files one after another.

The files are held open from the beginning, so that it can be sent to the end when somebody removes
them meanwhile. Nothing is verified here; whoever receives it does. Blocking calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from asyncgrpo_agent.core.adapters import AdapterId
from asyncgrpo_agent.errors import StoreError

CHUNK_BYTES: Final = 256 << 10  # few enough to be pushed to many replicas at once


class OpenAdapter:
    """`paths` are its files in the order of their names. OSError if one cannot be opened."""

    def __init__(self, adapter: AdapterId, key: str, sealed: bytes, paths: Iterable[Path]) -> None:
        self.adapter = adapter
        self.key = key
        self.sealed = sealed
        self._open = ExitStack()
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb", buffering=0)) for path in paths]
            self._open = stack.pop_all()
        self._files = iter(files)
        self._file = next(self._files, None)

    def read(self) -> bytes:
        """The next bytes of the files, b"" at the end. StoreError when one cannot be read."""
        try:
            while self._file is not None:
                if chunk := self._file.read(CHUNK_BYTES):
                    return chunk
                self._file = next(self._files, None)
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise StoreError(what, where=self.adapter.name, fix="See the system's log") from error
        return b""

    def close(self) -> None:
        self._open.close()

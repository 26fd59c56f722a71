"""hpack without state, so that blocks can be remembered. The only module that reaches into hpack.

The encoder never indexes and never uses Huffman codes: an encoded block depends on its headers
alone. The decoder remembers blocks by their bytes once the peer has acknowledged that our table
has size 0. What is remembered is bounded in size and number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.hpack import Decoder, Encoder
from hpack.struct import HeaderTuple

from asyncgrpo_agent.wire.headers import Headers

K = TypeVar("K")
V = TypeVar("V")

_MEMO_ENTRIES: Final = 256  # per connection and kind; agents use about five
_MEMO_BLOCK_BYTES: Final = 1 << 10  # larger blocks are not worth keeping
_TABLE_SIZE_ZERO: Final = b"\x20"  # HPACK: "my dynamic table has size 0"


class CompressionError(ProtocolError):
    """A header block that does not decode. h2 would call it a PROTOCOL_ERROR."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class StatelessEncoder(Encoder):
    """Literals only, never Huffman. Announces its empty table once, then needs no state."""

    def __init__(self) -> None:
        super().__init__()
        self._memo: dict[Headers, bytes] = {}
        self.announced = False

    @property
    def header_table_size(self) -> int:
        return 0

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        """The peer's table may have any size: an encoder may always use less of it."""

    def encode(self, headers: Iterable[tuple[bytes, bytes]], huffman: bool = True) -> bytes:  # type: ignore[override]
        key = tuple(headers)
        block = self._memo.get(key)
        if block is None:
            block = b"".join(self.add(header, sensitive=True) for header in key)
            remember(self._memo, key, block, len(block))
        if self.announced:
            return block
        self.announced = True
        return _TABLE_SIZE_ZERO + block


class MemoDecoder(Decoder):
    """hpack's decoder with a cap on fields, and a memory for blocks that need no state."""

    def __init__(self, *, max_list_bytes: int, max_fields: int) -> None:
        super().__init__(max_header_list_size=max_list_bytes)
        self.max_fields = max_fields
        self._fields = 0
        self._memo: dict[bytes, tuple[HeaderTuple, ...]] = {}

    def known(self, data: bytes | memoryview) -> tuple[HeaderTuple, ...] | None:
        """What `decode` would give, if it remembers."""
        return self._memo.get(bytes(data)) if self._stateless else None

    @property
    def _stateless(self) -> bool:
        # With a table of size 0, now and for good, the same bytes give the same headers.
        return self.header_table_size == 0 and self.max_allowed_table_size == 0

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        stateless = self._stateless
        if stateless and (known := self._memo.get(data)) is not None:
            return known
        self._fields = 0
        try:
            headers = tuple(super().decode(data, raw=raw))
        except OversizedHeaderListError:
            raise
        except HPACKError as error:
            raise CompressionError(f"header block: {error}") from error
        if stateless:
            remember(self._memo, data, headers, len(data))
        return headers

    def _decode_indexed(self, data: bytes | memoryview) -> tuple[HeaderTuple, int]:
        self._count_field()
        return super()._decode_indexed(data)

    def _decode_literal(
        self, data: bytes | memoryview, should_index: bool
    ) -> tuple[HeaderTuple, int]:
        self._count_field()
        return super()._decode_literal(data, should_index)

    def _count_field(self) -> None:
        self._fields += 1
        if self._fields > self.max_fields:
            raise OversizedHeaderListError(f"more than {self.max_fields} header fields")


def remember(memo: dict[K, V], key: K, value: V, size_bytes: int) -> None:
    """Keep a small value; start over when there are too many, so that memory stays bounded."""
    if size_bytes <= _MEMO_BLOCK_BYTES:
        if len(memo) >= _MEMO_ENTRIES:
            memo.clear()
        memo[key] = value

"""FakeClient: an HTTP/1.1 client on one connection, of which a test sees every byte."""

from __future__ import annotations

import h11
import trio


class FakeClient:
    """h11 from the client's side, over one connection."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(our_role=h11.CLIENT)

    async def send(
        self, method: str = "POST", target: str = "/echo", body: bytes = b"", **headers: str
    ) -> None:
        lines = [("host", "localhost"), ("content-length", str(len(body))), *headers.items()]
        events = (
            h11.Request(method=method, target=target, headers=lines),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        await self.stream.send_all(b"".join(self._h11.send(event) or b"" for event in events))

    async def receive(self) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = 0, {}, b""
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return status, headers, body

    async def _event(self) -> object:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(bytes(await self.stream.receive_some(65536)))
        return event

    async def ask(self, **request: str | bytes) -> tuple[int, dict[str, str], bytes]:
        await self.send(**request)  # type: ignore[arg-type]
        return await self.receive()

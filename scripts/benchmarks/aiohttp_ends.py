"""The yardstick: `aiohttp_ends.py server|client FOLDER [PORT]`, HTTP/1.1 over loopback TLS.

Same payloads, same load and the same certificate as the link's ends. The header fields are those
that such requests have in practice; on a link they travel as constants or not at all.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from pathlib import Path

from aiohttp import ClientSession, TCPConnector, web
from closed_loop import IN_FLIGHT, REQUEST, WARM_UP_S, Meter, cpu_s, read_command, reply

SERVER_NAME = "asyncgrpo-proxy"
REQUEST_FIELDS = {  # 15 with Host and Content-Length
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate",
    "Authorization": "Bearer 0123456789abcdef0123456789abcdef0123456789abcdef",
    "Content-Type": "application/json",
    "User-Agent": "asyncgrpo-bench/1.0 (linux; x86_64) python/3.11",
    "X-Request-Id": "6d1f7c1e-8d7c-4b55-9a34-1d6a1d1f3f10",
    "X-Run": "arithmetic-2024-05",
    "X-Group": "group-000123-of-000512",
    "X-Adapter": "a0001-0042",
    "X-Adapter-Digest": "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "X-Deadline": "600.0",
    "X-Priority": "0",
    "Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
RESPONSE_FIELDS = {  # 8 with Content-Type, Content-Length, Date and Server
    "X-Request-Id": "6d1f7c1e-8d7c-4b55-9a34-1d6a1d1f3f10",
    "X-Adapter": "a0001-0042",
    "X-Replica": "replica-1",
    "Cache-Control": "no-store",
}


# --- the server ------------------------------------------------------------------------------


async def serve(folder: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "chain.pem", folder / "key.pem")
    bodies: dict[str, bytes] = {}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        size = request.match_info["size"]
        body = bodies.get(size) or bodies.setdefault(size, bytes(int(size)))
        return web.Response(body=body, headers=RESPONSE_FIELDS, content_type="application/json")

    async def cpu(request: web.Request) -> web.Response:
        return web.Response(text=str(cpu_s()))

    app = web.Application()
    app.router.add_get("/cpu", cpu)
    app.router.add_post("/{size}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context, shutdown_timeout=1.0)
    await site.start()
    reply({"port": runner.addresses[0][1]})
    await asyncio.to_thread(read_command)  # nothing is ever sent: returns when the benchmark ends
    await runner.cleanup()


# --- the client ------------------------------------------------------------------------------


async def drive(folder: Path, port: int) -> None:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    url = f"https://127.0.0.1:{port}"
    connector = TCPConnector(ssl=context, limit=IN_FLIGHT + 1)
    async with ClientSession(connector=connector) as session:
        while (command := await asyncio.to_thread(read_command)) is not None:
            size_bytes, seconds = int(command["response_bytes"]), command["seconds"]
            reply(await measure(session, url, size_bytes, seconds))


async def measure(
    session: ClientSession, url: str, response_bytes: int, seconds: float
) -> dict[str, float]:
    meter = Meter(response_bytes)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(repeat(session, f"{url}/{response_bytes}", meter))
        await asyncio.sleep(WARM_UP_S)
        meter.begin(await far_cpu_s(session, url))
        await asyncio.sleep(seconds)
        return meter.finish(await far_cpu_s(session, url))


async def repeat(session: ClientSession, url: str, meter: Meter) -> None:
    while not meter.done:
        began = time.perf_counter()
        async with session.post(
            url, data=REQUEST, headers=REQUEST_FIELDS, server_hostname=SERVER_NAME
        ) as response:
            response.raise_for_status()
            async for data in response.content.iter_any():
                meter.received(len(data))
        meter.finished(began)


async def far_cpu_s(session: ClientSession, url: str) -> float:
    async with session.get(f"{url}/cpu", server_hostname=SERVER_NAME) as response:
        return float(await response.text())


if __name__ == "__main__":
    if sys.argv[1] == "server":
        asyncio.run(serve(Path(sys.argv[2])))
    else:
        asyncio.run(drive(Path(sys.argv[2]), int(sys.argv[3])))

# SPDX-License-Identifier: Apache-2.0
"""A server over HTTP: texts become memories with ids, and chats in OpenAI's form name them in place of the texts."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fastapi
    import h11
    import prometheus_client
    import uvicorn
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.exceptions import HTTPException
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError("a server needs FastAPI and uvicorn: pip install -e '.[serve]' in the clone") from error

from ..corpus.memory_store import MemoryStore
from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
from ..modeling.memory.compressed_context import CompressedContext
from .server_engine import Engine, Job, ServerError, in_time, stopping
from .server_jobs import AnswerJob, CompressionJob, OriginsJob, ServedModel, stream_event
from .server_memories import ProcessMemories, StoredMemories
from .server_requests import (
    EXPAND_TOOL,
    ChatRequest,
    ExpandRequest,
    MemoriesRequest,
    MemoryPart,
    OriginsRequest,
    passage_of,
)

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
# Memories of a chat that are read before their slots are counted.
_MEMORIES_AT_ONCE = 64
# Of a connection, for the headers of a request.
_HEADER_SECONDS = 30


@dataclass(frozen=True)
class ServerSettings:
    """Limits of a server.

    Args:
        api_key: of `Authorization: Bearer ...`, which all but `/`, `/health` and `/metrics` need; none if not given.
        batch_size: most requests that are computed at once.
        max_waiting: most requests that wait for their turn.
        max_tokens: most tokens of one request: of its texts to compress, or of slots, text and answer.
        max_body_bytes: of one request.
        max_memory_bytes: of all memories in the process.
        timeout: seconds that a request may take, its waiting included.
        grace: seconds that running requests have to end when the server stops.
    """

    api_key: str | None = None
    batch_size: int = 8
    max_waiting: int = 256
    max_tokens: int = 32_768
    max_body_bytes: int = 4 * 2**20
    max_memory_bytes: int = 2**30
    timeout: float = 300.0
    grace: int = 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "api_key" and not value > 0:
                raise ValueError(f"`{name}` must be above 0, got {value!r}")


def create_app(
    name: str,
    pipe: ContextCompressionQAPipeline,
    settings: ServerSettings | None = None,
    store: MemoryStore | None = None,
    examples: Sequence[dict[str, Any]] = (),
) -> fastapi.FastAPI:
    """Return the server of a checkpoint, which requests call `name`, as an ASGI application.

    Without a store the process keeps memories. The page offers `examples`: `title`, `text`, and `questions` with
    `answers`.
    """
    settings = settings or ServerSettings()
    # A store without memories is false.
    memories = ProcessMemories(settings.max_memory_bytes) if store is None else StoredMemories(store)
    model = ServedModel(name, pipe, memories)
    if store is not None and store.model_id != model.model_id:
        raise ValueError(f"the store is of the model {store.model_id!r}, {name!r} is {model.model_id!r}")
    return _routes(_Server(model, settings), examples)


def check_address(host: str, port: int) -> None:
    """Raise `OSError` where `run` could not listen there, `ValueError` for a port that is none."""
    if not 0 <= port < 2**16:
        raise ValueError(f"a port is a number from 0 to {2**16 - 1:,}, got {port}")
    _listening(host, port).close()


def run(app: fastapi.FastAPI, host: str, port: int, grace: int) -> None:
    """Serve an application until Ctrl-C or SIGTERM; requests that run then have `grace` seconds."""
    # Bound here: uvicorn would end the process, without an error to catch.
    with _listening(host, port) as listening:
        place = f"[{host}]" if ":" in host else host
        print(f"serving at http://{place}:{listening.getsockname()[1]} (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            _web_server(app, grace).run(sockets=[listening])


def _web_server(app: fastapi.FastAPI, grace: int) -> uvicorn.Server:
    config = uvicorn.Config(app, http=_Connection, log_level="warning", timeout_graceful_shutdown=grace)
    return uvicorn.Server(config)


def _listening(host: str, port: int) -> socket.socket:
    bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # asyncio sends small answers at once (TCP_NODELAY) where the socket says that it is TCP; this one leaves it open.
    return socket.socket(bound.family, bound.type, socket.IPPROTO_TCP, fileno=bound.detach())


class _Connection(H11Protocol):
    """A connection, which is closed where the headers of a request do not come in time."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_headers()

    def _limit_headers(self) -> None:
        is_reading = self.conn.their_state is h11.IDLE
        if is_reading and self._closing is None:
            self._closing = self.loop.call_later(_HEADER_SECONDS, self.timeout_keep_alive_handler)
        elif not is_reading and self._closing is not None:
            self._closing.cancel()
            self._closing = None


class _Server:
    """The model, the engine, the limits and the metrics of one application."""

    def __init__(self, model: ServedModel, settings: ServerSettings):
        self.model, self.settings = model, settings
        self.engine = Engine(settings.batch_size, settings.max_waiting)
        self.registry = registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        counter, histogram, gauge = prometheus_client.Counter, prometheus_client.Histogram, prometheus_client.Gauge
        prefix = "context_compressors_"
        self.requests = counter(f"{prefix}requests", "Requests by answer", ["path", "status"], registry=registry)
        self.tokens = counter(f"{prefix}tokens", "Tokens compressed, read and written", ["kind"], registry=registry)
        times: Any = {"registry": registry, "buckets": _SECONDS}
        self.seconds = histogram(f"{prefix}request_seconds", "Time of a whole request", ["path"], **times)
        self.first_token = histogram(f"{prefix}first_token_seconds", "Time to the first token", **times)
        for name, text, value in (
            ("waiting_requests", "Requests that wait for their turn", lambda: len(self.engine.waiting)),
            ("running_requests", "Requests that are computed", lambda: len(self.engine.running)),
            ("memory_bytes", "Bytes of memories in the process", lambda: model.memories.nbytes),
        ):
            gauge(prefix + name, text, registry=registry).set_function(value)

    def check_name(self, name: str | None) -> None:
        """Refuse a request to another model."""
        if name not in (None, self.model.name):
            message = f"there is no model {name!r}; this server has {self.model.name!r}"
            raise ServerError(404, message, "model_not_found", "model")

    def find_memories(self, ids: Sequence[str]) -> dict[str, CompressedContext]:
        """Return memories by id; `ServerError` for an unknown id."""
        memories = self.model.memories.get(ids)
        for name in ids:
            if name not in memories:
                message = f"there is no memory {name!r}: {self.model.memories.absence}"
                raise ServerError(404, message, "memory_not_found", "memory_id")
        return memories

    def check_length(self, what: str, num_tokens: int, limit: int | None, param: str) -> None:
        """Refuse more tokens than the server, or a model, allows."""
        most = min(self.settings.max_tokens, limit or self.settings.max_tokens)
        if num_tokens > most:
            message = f"{what}: {num_tokens:,} tokens, at most {most:,} are allowed"
            raise ServerError(400, message, "context_length_exceeded", param)

    async def compression(self, request: MemoriesRequest) -> CompressionJob:
        """Return the job of a request for memories."""
        self.check_name(request.model)
        num_tokens = await run_in_threadpool(self.model.num_tokens, request.text)
        self.check_length("the texts", num_tokens, None, "text")
        limits = self.settings.timeout, self.settings.batch_size
        return CompressionJob(self.model, request.text, num_tokens, request.ratio, *limits)

    async def origins(self, request: OriginsRequest) -> OriginsJob:
        """Return the job of the page's look into a document."""
        self.check_length("the text", await run_in_threadpool(self.model.num_tokens, [request.text]), None, "text")
        return OriginsJob(self.model, request.text, request.ratio, self.settings.timeout)

    async def answer(self, request: ChatRequest) -> AnswerJob:
        """Return the job of a chat."""
        self.check_name(request.model)
        model = self.model
        memories = await self.memories(request.memories)
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        text_ids = await run_in_threadpool(model.text_ids, messages, bool(memories), request.documents)
        seconds = self.settings.timeout
        job = AnswerJob(model, text_ids, memories, request, seconds, self.first_token.observe, self._count)
        what = f"{job.num_slots} slots, {len(text_ids)} tokens of text and {job.max_tokens} of the answer"
        num_tokens = job.num_slots + len(text_ids) + job.max_tokens
        self.check_length(what, num_tokens, model.max_positions, "messages")
        return job

    def _count(self, num_read: int, num_written: int) -> None:
        self.tokens.labels("read").inc(num_read)
        self.tokens.labels("written").inc(num_written)

    async def memories(self, parts: Sequence[MemoryPart]) -> list[CompressedContext]:
        """Return the memories that a chat names, in order; each is read once, and no more than the limits allow."""
        limit = self.model.max_positions
        # Each has a slot at least.
        self.check_length("the memories", len(parts), limit, "messages")
        ids = list(dict.fromkeys(part.memory_id for part in parts))
        rows: dict[int, CompressedContext] = {}
        for start in range(0, len(ids), _MEMORIES_AT_ONCE):
            memories = await run_in_threadpool(self.find_memories, ids[start : start + _MEMORIES_AT_ONCE])
            for place, part in enumerate(parts):
                if part.memory_id in memories:
                    memory = memories[part.memory_id]
                    rows[place] = memory if part.ratio is None else memory.at_ratio(part.ratio)
            self.check_length("the memories", sum(int(row.num_slots) for row in rows.values()), limit, "messages")
        return [rows[place] for place in range(len(parts))]

    async def start(self, making: Coroutine[Any, Any, Any], request: fastapi.Request) -> tuple[Any, Any]:
        """Return a job and its first event once its turn has come; cancel it if the client goes away before."""
        arrived = time.monotonic()
        job: Job | None = None

        async def first_event() -> Any:
            nonlocal job
            job = await making
            job.arrived = arrived
            self.engine.submit(job)
            return await job.next_event()

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        event = asyncio.ensure_future(in_time(first_event(), arrived, self.settings.timeout))
        gone = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                return job, event.result()
            # Nobody reads it; it is counted.
            raise ServerError(499, "the client has gone")
        except BaseException:
            if job is not None:
                self.engine.cancel(job)
            raise
        finally:
            event.cancel()
            gone.cancel()


def _routes(server: _Server, examples: Sequence[dict[str, Any]]) -> fastapi.FastAPI:
    """Return the application with its paths."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    # A text may say "</script>".
    shown = json.dumps({**server.model.facts, "examples": list(examples)}).replace("<", "\\u003c")
    page = page.replace("CHECKPOINT", shown, 1)

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await run_in_threadpool(server.engine.close)

    # Pages of documentation would load scripts from elsewhere.
    app = fastapi.FastAPI(title="context-compressors", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(_Gate, server=server)

    async def refuse(request: fastapi.Request, error: Exception) -> Response:
        return _refusal(_as_server_error(error))

    for kind in (ServerError, RequestValidationError, HTTPException, ValueError, TypeError, Exception):
        app.add_exception_handler(kind, refuse)

    @app.get("/")
    async def show_page() -> Response:
        return HTMLResponse(page)

    @app.post("/page/slots")
    async def slots(body: OriginsRequest, request: fastapi.Request) -> dict[str, Any]:
        _, origins = await server.start(server.origins(body), request)
        return origins

    @app.get("/health")
    async def health() -> Response:
        engine = server.engine
        state = {"waiting": len(engine.waiting), "running": len(engine.running), "models": [server.model.name]}
        status, code = ("ok", 200) if engine.is_alive else ("stopping", 503)
        return JSONResponse({"status": status, **state}, code)

    @app.get("/metrics")
    def metrics() -> Response:
        text = prometheus_client.generate_latest(server.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model.card]}

    @app.post("/v1/memories")
    async def compress(body: MemoriesRequest, request: fastapi.Request) -> dict[str, Any]:
        job, memories = await server.start(server.compression(body), request)
        server.tokens.labels("compressed").inc(job.num_tokens)
        usage = {"prompt_tokens": job.num_tokens, "total_tokens": job.num_tokens}
        return {"object": "list", "model": server.model.name, "data": memories, "usage": usage}

    @app.get("/v1/memories/{memory_id:path}")
    def memory(memory_id: str) -> dict[str, Any]:
        return server.model.describe(memory_id, server.find_memories([memory_id])[memory_id])

    @app.delete("/v1/memories/{memory_id:path}")
    def delete(memory_id: str) -> dict[str, Any]:
        server.find_memories([memory_id])
        server.model.memories.delete(memory_id)
        return {"id": memory_id, "object": "memory", "deleted": True}

    @app.get("/v1/tools")
    async def tools() -> dict[str, Any]:
        return {"object": "list", "data": [EXPAND_TOOL]}

    @app.post("/v1/tools/expand")
    def expand(body: ExpandRequest) -> dict[str, Any]:
        fields = body.model_dump(exclude={"memory_id"})
        server.find_memories([body.memory_id])
        text = server.model.memories.text(body.memory_id)
        if text is None:
            raise ServerError(404, f"the text of {body.memory_id!r} was not kept", "text_not_found", "memory_id")
        return {"memory_id": body.memory_id, **passage_of(text=text, name=body.memory_id, **fields)}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: fastapi.Request) -> Any:
        # What fails before the first token is refused with its status, streamed or not.
        job, event = await server.start(server.answer(body), request)
        if body.stream:
            return StreamingResponse(job.stream(event), media_type="text/event-stream")
        return job.response(event)

    return app


# Of these nobody is asked for a key.
_OPEN_PATHS = ("/", "/health", "/metrics")


class _Gate:
    """Asks for the key, refuses bodies that are too long or too slow, and counts requests."""

    def __init__(self, app: Any, server: _Server):
        self.app, self.server = app, server

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrived, status, has_started = time.monotonic(), 500, False

        async def counted_send(message: dict[str, Any]) -> None:
            nonlocal status, has_started
            status, has_started = message.get("status", status), True
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_key(scope, headers.get(b"authorization", b""))
            await self.app(scope, self._limited(receive, headers.get(b"content-length", b"0")), counted_send)
        except ServerError as error:
            await _refusal(error)(scope, receive, counted_send)
        except asyncio.CancelledError:
            # Broken off by uvicorn, at the end of its grace.
            if has_started:
                await send({"type": "http.response.body", "body": stream_event(stopping().body).encode()})
            else:
                await _refusal(stopping())(scope, receive, counted_send)
        finally:
            path = scope["route"].path if "route" in scope else "other"
            self.server.requests.labels(path, status).inc()
            self.server.seconds.labels(path).observe(time.monotonic() - arrived)

    def _check_key(self, scope: dict[str, Any], authorization: bytes) -> None:
        key = self.server.settings.api_key
        # Behind a proxy or in another app a prefix stands in front of each path.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_open = key is None or path in _OPEN_PATHS
        if not (is_open or hmac.compare_digest(authorization, f"Bearer {key}".encode())):
            message = "a request needs the key of this server: `Authorization: Bearer KEY`"
            raise ServerError(401, message, "wrong_api_key")

    def _limited(self, receive: Any, content_length: bytes) -> Any:
        most, seconds = self.server.settings.max_body_bytes, self.server.settings.timeout
        num_bytes, is_read, deadline = 0, False, time.monotonic() + seconds

        async def limited_receive() -> dict[str, Any]:
            nonlocal num_bytes, is_read
            try:
                message = await asyncio.wait_for(receive(), None if is_read else deadline - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, f"the request was not sent within {seconds:g} seconds (`timeout`)") from None
            num_bytes += len(message.get("body", b""))
            is_read = not message.get("more_body", False)
            if max(num_bytes, int(content_length)) > most:
                raise HTTPException(413, f"the request has more than {most:,} bytes")
            return message

        return limited_receive


def _as_server_error(error: Exception) -> ServerError:
    if isinstance(error, HTTPException):
        return ServerError(error.status_code, str(error.detail))
    if not isinstance(error, RequestValidationError):
        return ServerError.of(error)
    if isinstance(error.body, bytes):
        return ServerError(400, "the body is not read as JSON: send `Content-Type: application/json`", "invalid_json")
    problems = []
    for problem in error.errors():
        # The first is "body".
        kind, place = problem["type"], ".".join(map(str, problem["loc"][1:]))
        if kind == "json_invalid":
            return ServerError(400, f"the body is no JSON: {problem['ctx']['error']}", "invalid_json")
        what = problem["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden":
            what = "is no field of this request"
        value = "" if kind in ("missing", "value_error") else f", got {json.dumps(problem['input'], default=str)[:80]}"
        problems.append((place, f"{place}: {what}{value}" if place else f"{what}{value}"))
    return ServerError(400, "; ".join(text for _, text in problems[:3]), "invalid_value", problems[0][0] or None)


def _refusal(error: ServerError) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse(error.body, error.status, headers)

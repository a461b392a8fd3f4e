# SPDX-License-Identifier: Apache-2.0
"""The engine of a server: one thread, which takes waiting requests of one kind together, oldest first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Hashable
from typing import Any

logger = logging.getLogger(__name__)


class ServerError(Exception):
    """The answer of a request that is refused or fails."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @classmethod
    def of(cls, error: Exception) -> ServerError:
        """Return the answer for any error: 400 for what the models refuse, 500 for the rest."""
        if isinstance(error, cls):
            return error
        if isinstance(error, (ValueError, TypeError)):
            return cls(400, str(error), "invalid_value")
        logger.error("a request failed", exc_info=error)
        return cls(500, f"the server failed at this request ({type(error).__name__}); its log says more", "internal")

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API writes it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Job:
    """A request that waits for a model or has its turn; made in its connection's loop, run in the engine's thread."""

    def __init__(self, key: Hashable, seconds: float):
        self.key, self.seconds = key, seconds
        self.arrived = time.monotonic()
        self.is_done = self.is_cancelled = self.has_sent = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    @classmethod
    def run(cls, jobs: list[Any]) -> None:
        """Do what all of these ask for, and `finish` each; one that raises is run alone, if it has sent nothing."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Return whether nobody waits for it any more."""
        return self.is_cancelled or time.monotonic() > self.arrived + self.seconds

    def send(self, event: Any) -> None:
        """Hand a part of the answer to the connection."""
        self.has_sent = True
        # The loop of a server that was stopped is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def finish(self, result: Any) -> None:
        """Hand the last part, or an error, to the connection."""
        self.is_done = True
        self.send(ServerError.of(result) if isinstance(result, Exception) else result)

    async def next_event(self) -> Any:
        """Return the next part of the answer."""
        event = await in_time(self._events.get(), self.arrived, self.seconds)
        if isinstance(event, ServerError):
            raise event
        return event


async def in_time(awaited: Awaitable[Any], arrived: float, seconds: float) -> Any:
    """Return what a request waits for; `ServerError` after its time."""
    try:
        async with asyncio.timeout(arrived + seconds - time.monotonic()):
            return await awaited
    except TimeoutError:
        raise ServerError(504, f"not answered within {seconds:g} seconds (`timeout`)", "timeout") from None


class Engine:
    """Runs jobs in a thread of its own: of those that wait, the oldest with others of its key."""

    def __init__(self, batch_size: int, max_waiting: int):
        self.batch_size, self.max_waiting = batch_size, max_waiting
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.is_closing = False
        self._wakes = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to run jobs."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether jobs are run."""
        return self._thread.is_alive() and not self.is_closing

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn."""
        with self._wakes:
            if not self.is_alive:
                raise stopping()
            if len(self.waiting) >= self.max_waiting:
                message = f"{len(self.waiting)} requests wait, as many as may: try later"
                raise ServerError(429, message, "too_many_waiting")
            self.waiting.append(job)
            self._wakes.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more: it has no turn, or ends at its next token."""
        job.is_cancelled = True
        with self._wakes, contextlib.suppress(ValueError):
            self.waiting.remove(job)

    def close(self) -> None:
        """End what runs at its next token, refuse what waits, and end the thread."""
        with self._wakes:
            self.is_closing = True
            for job in self.running:
                job.is_cancelled = True
            for job in self.waiting:
                job.finish(stopping())
            self.waiting.clear()
            self._wakes.notify()
        # A pass through a model cannot be broken off; the process ends without it.
        self._thread.join(timeout=10)

    def _serve(self) -> None:
        while True:
            with self._wakes:
                self.running = []
                self._wakes.wait_for(lambda: self.waiting or self.is_closing)
                if self.is_closing:
                    return
                key = self.waiting[0].key
                self.running = [job for job in self.waiting if job.key == key][: self.batch_size]
                self.waiting = [job for job in self.waiting if job not in self.running]
            self._run(self.running)
            for job in self.running:
                if self.is_closing and not job.is_done:
                    job.finish(stopping())

    def _run(self, jobs: list[Job]) -> None:
        try:
            type(jobs[0]).run(jobs)
            return
        except Exception as error:
            failure = error
            # What its frames hold, such as a cache that was too large, is freed before anything is tried again.
            traceback.clear_frames(failure.__traceback__)
        for job in jobs:
            if job.is_done or job.is_over:
                continue
            if len(jobs) == 1 or job.has_sent:
                job.finish(failure)
            else:
                # Whose fault it was shows when each is alone; the others must not suffer from it.
                self._run([job])


def stopping() -> ServerError:
    """Return the error of a server that stops."""
    return ServerError(503, "the server is stopping", "stopping")

"""Virtual time: events in a heap, tasks that are generators, processes that crash and freeze.

A task yields what it waits for: seconds, a `Promise`, or `Either` of several with a time-out.
Everything runs in one thread; the order of events depends on the seed alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.errors import DilocoError


class CrashedError(Exception):
    """The process that runs dies here; nothing of it goes on."""


class Promise:
    """A value that comes later, or an error in its place."""

    __slots__ = ("_callbacks", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: DilocoError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def set(self, value: object = None) -> None:
        """The value is there; the first one counts."""
        if not self.done:
            self.done, self.value = True, value
            self._tell()

    def fail(self, error: DilocoError) -> None:
        """There will be no value."""
        if not self.done:
            self.done, self.error = True, error
            self._tell()

    def result(self) -> Any:  # noqa: ANN401  what was promised, whatever that is
        """The value, or the error raised."""
        if self.error is not None:
            raise self.error
        return self.value

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back once it is done; at once where it is."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@dataclass(frozen=True, slots=True)
class Either:
    """Waits for the first of several promises, or for a time-out; raises nothing."""

    promises: Sequence[Promise]
    timeout_s: float | None = None


Work = Generator[Any, Any, Any]
"""What a task runs."""


class Process:
    """Something that may die, be started again, and be stopped for a while (SIGSTOP).

    Args:
        kernel: time.
        name: for people.
    """

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.life = 0
        self.alive = False
        self.frozen_until = 0.0
        self.on_death: list[Callable[[], None]] = []

    def spawn(self, work: Work) -> Task:
        """Runs a task of this life of the process."""
        return Task(self, work)

    def begin(self) -> None:
        """A new life; what the one before had under way is gone."""
        assert not self.alive, f"{self.name} lives already"
        self.life += 1
        self.alive, self.frozen_until = True, 0.0

    def die(self) -> None:
        """Ends without another word."""
        self.alive = False
        self.life += 1
        callbacks, self.on_death = self.on_death, []
        for callback in callbacks:
            callback()

    def freeze(self, seconds: float) -> None:
        """Does nothing for a while, and does not notice."""
        self.frozen_until = max(self.frozen_until, self.kernel.now + seconds)

    @property
    def speaks_at(self) -> float:
        """When what it sends now leaves."""
        return max(self.kernel.now, self.frozen_until)


class Task(Promise):
    """A generator that runs; as a promise, what it returns.

    Args:
        process: whose it is: it dies and freezes with it.
        work: the generator.
    """

    __slots__ = ("_is_heard", "_life", "_process", "_token", "_work")

    def __init__(self, process: Process, work: Work) -> None:
        super().__init__()
        self._process, self._life, self._work = process, process.life, work
        self._token = 0
        self._is_heard = False
        self._resume(0.0, 0)

    def cancel(self) -> None:
        """Ends it where it waits."""
        if not self.done:
            self._token += 1
            self.done = True
            self._work.close()
            self._tell()

    def then(self, callback: Callable[[], None]) -> None:
        """As any promise's."""
        self._is_heard = True
        super().then(callback)

    def result(self) -> Any:  # noqa: ANN401  as any promise's
        """As any promise's."""
        self._is_heard = True
        return super().result()

    @property
    def is_lost(self) -> bool:
        """Whether it failed in a process that lives on, and nobody asked what became of it."""
        return self._life == self._process.life and not self._is_heard and self.error is not None

    def __repr__(self) -> str:
        """Whose it is, and why it failed."""
        return f"<{self._work} of {self._process.name}: {self.error}>"

    def _resume(self, delay: float, token: int) -> None:
        self._process.kernel.at(delay, lambda: self._step(token), self._process, self._life)

    def _step(self, token: int, waited: Promise | None = None) -> None:
        if self.done or token != self._token:
            return
        self._token += 1
        try:
            if waited is None:
                item = self._work.send(None)
            elif waited.error is not None:
                item = self._work.throw(waited.error)
            else:
                item = self._work.send(waited.value)
        except StopIteration as end:
            self.set(end.value)
        except DilocoError as error:
            if not self._callbacks:
                self._process.kernel.unheard.append(self)
            self.fail(error)
        else:
            self._wait(item)

    def _wait(self, item: float | Promise | Either) -> None:
        token, process, kernel = self._token, self._process, self._process.kernel

        def wake(waited: Promise | None) -> None:
            if token == self._token and not self.done:
                kernel.at(0.0, lambda: self._step(token, waited), process, self._life)

        if isinstance(item, Promise):
            item.then(lambda: wake(item))
        elif isinstance(item, Either):
            for promise in item.promises:
                promise.then(lambda: wake(None))
            if item.timeout_s is not None:
                self._resume(item.timeout_s, token)
        else:
            self._resume(item, token)


def within(promise: Promise, timeout_s: float) -> Work:
    """Waits for a promise; TimeoutError where it takes longer."""
    yield Either((promise,), timeout_s)
    if not promise.done:
        raise TimeoutError
    return promise.result()


class Kernel:
    """Time and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.unheard: list[Task] = []
        self._serial = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None], Process | None, int]] = []

    def at(
        self, delay: float, what: Callable[[], None], process: Process | None = None, life: int = 0
    ) -> None:
        """Calls back after a delay; for a process only while that life of it goes on."""
        item = (self.now + delay, next(self._serial), what, process, life)
        heapq.heappush(self._queue, item)

    def run(self, until: float, done: Callable[[], bool] | None = None) -> bool:
        """Lets time pass; returns whether ``done`` came true."""
        while self._queue and self._queue[0][0] <= until:
            at, _, what, process, life = heapq.heappop(self._queue)
            self.now = at
            if process is not None:
                if life != process.life or not process.alive:
                    continue
                if process.frozen_until > at:
                    self.at(process.frozen_until - at, what, process, life)
                    continue
            self.num_events += 1
            try:
                what()
            except CrashedError:
                assert process is not None, "only a process crashes"
                process.die()
            if done is not None and done():
                return True
        self.now = max(self.now, until)
        return False

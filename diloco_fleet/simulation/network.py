"""The network: streams in order that break, calls that lose request or answer, partitions."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.simulation.kernel import Either, Kernel, Process, Promise, Work


def unavailable(what: str) -> DilocoError:
    """What a caller gets where nothing answers."""
    return DilocoError(Reason.UNAVAILABLE, f"{what} does not answer")


class Network:
    """Between processes.

    Args:
        kernel: time.
        rng: chance.

    Attributes:
        is_rough: False once no fault happens any more.
        loss: share of calls that are lost on the way, or whose answer is.
        held_up: share of messages that are held up for seconds.
    """

    def __init__(self, kernel: Kernel, rng: random.Random) -> None:
        self.kernel = kernel
        self._rng = rng
        self.is_rough = True
        self.loss = self.held_up = 0.0
        self.streams: list[Stream] = []
        self._cuts: dict[frozenset[str], float] = {}

    def cut(self, a: str, b: str, seconds: float) -> None:
        """Nothing passes between two processes for a while."""
        self._cuts[frozenset((a, b))] = self.kernel.now + seconds

    def heal(self) -> None:
        """No fault happens any more."""
        self.is_rough = False
        self._cuts.clear()

    def is_cut(self, a: Process, b: Process) -> bool:
        """Whether nothing passes now."""
        if not self._cuts:
            return False
        return self._cuts.get(frozenset((a.name, b.name)), 0.0) > self.kernel.now

    def latency(self) -> float:
        """Of one message, seconds."""
        if self.is_rough and self._rng.random() < self.held_up:
            return self._rng.uniform(0.2, 4.0)
        return 0.001 + 0.02 * self._rng.random() ** 2

    def detection(self) -> float:
        """How long it takes until a broken connection is noticed, seconds."""
        return self._rng.uniform(0.05, 2.5)

    def lost(self, a: Process, b: Process) -> bool:
        """Whether a message of a call gets lost."""
        return self.is_cut(a, b) or (self.is_rough and self._rng.random() < self.loss)

    def open(self, caller: Process, callee: Process, serve: Callable[[End], Work]) -> End:
        """Opens a stream; ``serve`` runs at the callee once it hears of it."""
        stream = Stream(self, caller, callee)
        self.streams = [x for x in self.streams if not x.broken]
        self.streams.append(stream)

        def arrive() -> None:
            if stream.broken:
                return
            if not callee.alive or self.is_cut(caller, callee):
                stream.break_off()
                return
            stream.ends[1].life = callee.life
            callee.on_death.append(stream.died)
            callee.spawn(_serve(stream.ends[1], serve))

        caller.on_death.append(stream.died)
        stream.ends[0].arrives_at = caller.speaks_at + self.latency()
        self.kernel.at(stream.ends[0].arrives_at - self.kernel.now, arrive)
        return stream.ends[0]

    def call(
        self, caller: Process, callee: Process, serve: Callable[[], Work], timeout_s: float,
        held_s: float = 0.0,
    ) -> Promise:  # fmt: skip
        """One call; it fails as UNAVAILABLE where no answer comes, whatever was done."""
        answer, life = Promise(), caller.life
        leaves_s = caller.speaks_at - self.kernel.now

        def settle(promise: Promise) -> None:
            if promise.error is not None:
                answer.fail(promise.error)
            else:
                answer.set(promise.value)

        def back(task: Promise) -> None:
            if not self.lost(callee, caller):
                delay = callee.speaks_at - self.kernel.now + self.latency()
                self.kernel.at(delay, lambda: settle(task), caller, life)

        def arrive() -> None:
            if self.lost(caller, callee):
                return
            if not callee.alive:
                error = unavailable(callee.name)
                self.kernel.at(self.latency(), lambda: answer.fail(error), caller, life)
                return
            task = callee.spawn(serve())
            task.then(lambda: back(task))

        self.kernel.at(leaves_s + self.latency() + held_s, arrive)
        late = unavailable(callee.name)
        self.kernel.at(leaves_s + timeout_s, lambda: answer.fail(late), caller, life)
        return answer


def _serve(end: End, serve: Callable[[End], Work]) -> Work:
    try:
        yield from serve(end)
    except DilocoError as error:
        end.close(error)
    else:
        end.close(unavailable("the other side"))


class End:
    """One side of a stream.

    Attributes:
        process: whose it is.
        arrives_at: when the last message that was sent here arrives.
    """

    def __init__(self, stream: Stream, process: Process) -> None:
        self.stream = stream
        self.process = process
        self.life = process.life
        self.arrives_at = 0.0
        self.closed = False
        self._inbox: deque[Any] = deque()
        self._wake = Promise()

    @property
    def other(self) -> End:
        """The other side."""
        a, b = self.stream.ends
        return b if self is a else a

    def send(self, message: object) -> None:
        """Sends; what is sent into a broken stream is lost."""
        if not self.closed:
            self._put(message)

    def close(self, error: DilocoError) -> None:
        """Ends the stream after what was sent."""
        if not self.closed:
            self.closed = True
            self._put(error)

    def _put(self, message: object) -> None:
        network, other = self.stream.network, self.other
        self.arrives_at = max(self.arrives_at, self.process.speaks_at + network.latency())

        def arrive() -> None:
            if self.stream.broken:
                return
            if network.is_cut(self.process, other.process):
                self.stream.break_off()
            else:
                other.hear(message)
                if isinstance(message, DilocoError):
                    self.stream.broken = True

        network.kernel.at(self.arrives_at - network.kernel.now, arrive)

    def hear(self, message: object) -> None:
        """Something arrived."""
        self._inbox.append(message)
        wake, self._wake = self._wake, Promise()
        wake.set()

    def receive(self, timeout_s: float | None = None) -> Work:
        """The next message; None after the time-out.

        Raises:
            DilocoError: what ended the stream.
        """
        if not self._inbox:
            yield Either((self._wake,), timeout_s)
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        if isinstance(message, DilocoError):
            self.closed = True
            self._inbox.appendleft(message)
            raise message
        return message


class Stream:
    """Two ends; messages of one direction stay in order."""

    def __init__(self, network: Network, caller: Process, callee: Process) -> None:
        self.network = network
        self.ends = (End(self, caller), End(self, callee))
        self.broken = False

    def break_off(self) -> None:
        """The connection is gone, with whatever is on its way; both sides notice in time."""
        if self.broken:
            return
        self.broken = True
        for end in self.ends:
            self._tell(end, self.network.detection())

    def died(self) -> None:
        """One of the two processes died: the other hears of it, if it can."""
        if self.broken:
            return
        for end in self.ends:
            if not end.process.alive or end.process.life != end.life:
                other = end.other
                far = self.network.is_cut(end.process, other.process)
                delay = self.network.detection() if far else self.network.latency()
                self._tell(other, max(end.arrives_at - self.network.kernel.now, 0.0) + delay)
                self.network.kernel.at(
                    max(end.arrives_at - self.network.kernel.now, 0.0), self._is_over
                )

    def _is_over(self) -> None:
        self.broken = True

    def _tell(self, end: End, delay: float) -> None:
        error = unavailable(end.other.process.name)
        self.network.kernel.at(delay, lambda: end.hear(error))

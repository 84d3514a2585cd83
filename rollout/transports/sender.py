"""The trainer's side of an update whose bytes go out on a thread of their own, while the ranks pull."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from moebius.rollout.errors import MoebiusError
from moebius.rollout.weights import Entry, NamedTensors, Pair, batches, plan

GRACE_S = 10.0  # for a thread to see that its offer was given up
S = TypeVar("S", bound="Sender")
Offer = tuple[str, list[tuple[Any, ...]]]  # source and args of the `pull_update` that receives

_log = logging.getLogger(__name__)


class GivenUp(Exception):
    """The offer that is being sent was given up."""


class Sending(threading.Thread):
    """One offer on its way."""

    def __init__(self, send: Callable[[Sending], None]) -> None:
        super().__init__(daemon=True)
        self._send = send
        self._given_up = threading.Event()
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See Thread."""
        try:
            self._send(self)
        except BaseException as error:  # noqa: BLE001  (raised by `Sender.wait`)
            self.failure = error

    def give_up(self) -> None:
        """Have the thread end at its next `go_on`."""
        self._given_up.set()

    def go_on(self) -> None:
        """Called by the thread where it may stop. Raises GivenUp."""
        if self._given_up.is_set():
            raise GivenUp("the trainer has given the update up")


class Link(Protocol):
    """A way to all ranks."""

    def offer(self, session: int) -> Offer:
        """What the ranks need to know to read this session."""

    def begin(self, session: int, sending: Sending) -> None:
        """Wait until all ranks read, calling `go_on` meanwhile; nothing may block for long before that."""

    def put(self, session: int, number: int, pairs: list[Pair], entries: list[Entry], nbytes: int) -> None:
        """Send a bucket."""

    def end(self, session: int, number: int, error: str | None) -> None:
        """Tell the ranks that those were all buckets, or what went wrong."""

    def drain(self) -> None:
        """Wait until the ranks have read what was sent."""

    def stop(self) -> None:
        """Have those that wait in it see an error, as far as that can be done."""

    def close(self) -> None:
        """Free it; nobody waits in it any more."""


class Sender:
    """What the transports have in common that a trainer keeps from update to update; a context manager."""

    def __init__(self, open_link: Callable[[], Link], bucket_bytes: int) -> None:
        self._open, self._bucket_bytes = open_link, bucket_bytes
        self._link: Any = open_link()  # a Link; None: the last one was given up
        self._session = 0
        self._sending: Sending | None = None

    def offer(self, named_tensors: NamedTensors) -> Offer:
        """Begin to send; returns `source` and `args` of the `pull_update` that receives.

        A stream of tensors is read on another thread, as it is sent. The last offer must have been taken, or given up
        with `cancel`.
        """
        self.wait()
        if self._link is None:
            self._link = self._open()
        link: Link = self._link
        self._session += 1
        session = self._session
        offered = link.offer(session)

        def send(sending: Sending) -> None:
            number = 0
            try:
                link.begin(session, sending)
                for pairs in batches(named_tensors, self._bucket_bytes):
                    sending.go_on()
                    link.put(session, number, pairs, *plan(pairs))
                    number += 1
                link.end(session, number, None)
            except BaseException as error:
                link.end(session, number, f"{type(error).__name__}: {error}")
                raise

        self._sending = Sending(send)
        return offered

    def wait(self) -> None:
        """Until the last offer has been sent. Raises MoebiusError if it could not be."""
        sending, self._sending = self._sending, None
        if sending is not None:
            try:
                sending.join()
            except BaseException:  # Ctrl-C: it is still there to be given up
                self._sending = sending
                raise
            if sending.failure is not None:
                raise MoebiusError(f"weights were not sent: {sending.failure}") from sending.failure

    def cancel(self) -> None:
        """Give the last offer up, as after a `pull_update` that has failed: without this, the next call waits for ranks
        that will not read it. Waits for nobody, and raises nothing; the next offer opens another connection.
        """
        sending, self._sending = self._sending, None
        link, self._link = self._link, None
        if sending is not None:
            sending.give_up()
        if link is not None:
            link.stop()
        try:
            if sending is not None:
                sending.join(GRACE_S)
        finally:
            if sending is not None and sending.is_alive():
                _log.warning("an offer of weights that was given up is still being sent: it ends at its timeout")
            elif link is not None:
                link.close()

    def close(self) -> None:
        """Leave, when the last offer has been sent and read."""
        link = self._link
        try:
            self.wait()
            if link is not None:
                link.drain()
        finally:
            self._link = None
            if link is not None:
                link.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.cancel()

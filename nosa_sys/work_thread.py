"""WorkThread: one thread that runs calls in the order given, with a bounded queue and no error lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Call = Callable[[], None]


class WorkThread:
    """Runs what `submit` gets, one after another. After an error nothing more is run, only counted as over.

    Args:
        name: of the thread.
        max_pending: sum of the sizes of the calls that may be waiting or running; `submit` blocks where it would be
            more, but never for a call that is alone.
    """

    def __init__(self, name: str, max_pending: int) -> None:
        self.error: BaseException | None = None
        self._calls: queue.SimpleQueue[tuple[Call, Call, int] | None] = queue.SimpleQueue()
        self._max_pending, self._submitted, self._over = max_pending, 0, 0
        self._changed = threading.Condition()
        # a daemon: a program that dies without `stop` must not hang on what it left here
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call, after: Call = lambda: None, *, size: int = 1) -> None:
        """Queue ``call``; ``after`` follows it, whether it ran, failed or was skipped. Raises the error of any call
        before, this time and every time."""
        if not self._has_room(size):
            with self._changed:
                self._changed.wait_for(lambda: self._has_room(size))
        self.raise_error()
        self._submitted += size
        self._calls.put((call, after, size))

    def _has_room(self, size: int) -> bool:
        pending = self._submitted - self._over
        return pending == 0 or pending + size <= self._max_pending

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Wait until everything submitted is over, and end the thread; ``error`` tells how it went. Harmless twice."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        for call, after, size in iter(self._calls.get, None):
            try:
                if self.error is None:
                    call()
            except BaseException as error:
                self.error = error
            after()
            del call, after  # what they hold on to is over, too
            with self._changed:
                self._over += size
                self._changed.notify_all()

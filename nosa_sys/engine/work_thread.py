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
        max_pending: calls that may be waiting or running; `submit` blocks where there are more.
    """

    def __init__(self, name: str, max_pending: int) -> None:
        self.error: BaseException | None = None
        self._calls: queue.SimpleQueue[tuple[Call, Call] | None] = queue.SimpleQueue()
        self._max_pending, self._n_submitted, self._n_over = max_pending, 0, 0
        self._over = threading.Condition()
        # a daemon: a program that dies without `stop` must not hang on what it left here
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call, after: Call = lambda: None) -> None:
        """Queue ``call``; ``after`` follows it, whether it ran, failed or was skipped. Raises the error of any call
        before, this time and every time."""
        if self._n_submitted - self._n_over >= self._max_pending:
            with self._over:
                self._over.wait_for(lambda: self._n_submitted - self._n_over < self._max_pending)
        self.raise_error()
        self._n_submitted += 1
        self._calls.put((call, after))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Wait until everything submitted is over, and end the thread; ``error`` tells how it went. Harmless twice."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        for call, after in iter(self._calls.get, None):
            try:
                if self.error is None:
                    call()
            except BaseException as error:
                self.error = error
            after()
            with self._over:
                self._n_over += 1
                self._over.notify_all()

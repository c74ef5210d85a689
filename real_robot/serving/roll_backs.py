"""Roll-backs on their way to the disk: what cannot be written is kept, and tried again."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

from sims.errors import UserError


class RollBackRecord:
    """``record``: writes which version failed and which one serves instead; UserError or ValueError where it cannot,
    which is said once. Thread-safe.
    """

    def __init__(self, record: Callable[[str, str], None]) -> None:
        self._record, self._unwritten, self._why = record, deque[tuple[str, str]](), ""
        self._writing = threading.Lock()

    @property
    def unwritten(self) -> list[str]:
        """The versions that failed and are not recorded as such yet."""
        return [failed for failed, _ in list(self._unwritten)]

    def add(self, failed: str, before: str) -> None:
        self._unwritten.append((failed, before))

    def write(self) -> None:
        """Record those that are not recorded yet; what cannot be is kept for the next call."""
        with self._writing:
            while self._unwritten:
                failed, before = self._unwritten[0]
                what = f"that {failed[:12]} was rolled back"
                try:
                    self._record(failed, before)
                except (UserError, ValueError) as error:
                    if str(error) != self._why:
                        print(f"a restart forgets {what}, until it can be written: {error}", file=sys.stderr)
                    self._why = str(error)
                    return
                self._unwritten.popleft()
                if self._why:
                    print(f"it is written now {what}", file=sys.stderr)
            self._why = ""

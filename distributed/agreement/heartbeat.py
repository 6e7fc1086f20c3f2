"""What a rank reports of itself about once a second: that it lives, where it is, and how far it has come.

Before there is a session it does so openly, to ranks that wait for it; from then on to those of the session alone.
"""

from __future__ import annotations

import socket
import threading

from gradsplit.distributed.agreement.bulletin import Bulletin
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.rank_process import place_of_main_thread, this_process

LEFT = "has ended, or destroyed the process group"


class Heartbeat:
    """Of one rank of a process group.

    Attributes:
        doing: what others may have to wait for.
        failed: the error that its program got of ranks that did not come to the first meeting.
        left: why nobody is to watch this rank any longer; "" as long as they are.
    """

    def __init__(self, bulletin: Bulletin, rank: int, operations: Operations) -> None:
        self.doing = self.failed = self.left = ""
        self._bulletin, self._rank, self._operations = bulletin, rank, operations
        self._process, self._host = this_process(), socket.gethostname()
        self._beats = 0
        self._lock = threading.RLock()

    def send(self) -> None:
        with self._lock:  # what is sent last is posted last
            self._beats += 1
            report = {
                "beat": self._beats,
                "doing": self.doing,
                "place": place_of_main_thread(),
                "process": self._process,
                "host": self._host,
                "operation": self._operations.as_report(),
                "failed": self.failed,
                "left": self.left or (LEFT if self._operations.is_leaving else ""),
            }
            post = self._bulletin.post if self._bulletin.has_session else self._bulletin.post_openly
            post(f"alive/{self._rank}", report)

    def met(self) -> None:
        """There is a session. A rank that ended before it reports in that would never be missed."""
        with self._lock:
            self.send()
            self._bulletin.post_openly(f"alive/{self._rank}", None)

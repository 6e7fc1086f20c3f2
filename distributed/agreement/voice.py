"""What a rank says of itself about once a second: that it lives, where it is, and how far it has come with the others.

Before there is a session it says so openly, to ranks that wait for it; from then on to those of the session alone.
"""

from __future__ import annotations

import socket
import threading

from gradsplit.distributed.agreement.bulletin import Bulletin
from gradsplit.distributed.agreement.operations import Operations
from gradsplit.distributed.agreement.rank_process import place_of_main_thread, this_process

LEFT = "has ended, or destroyed the process group"


class Voice:
    """Of one rank of a process group.

    Attributes:
        doing: what others may have to wait for.
        failed: what this rank has told the program of ranks that it waited for openly.
        left: why nobody is to look after this rank any longer; "" as long as they are.
    """

    def __init__(self, bulletin: Bulletin, rank: int, operations: Operations) -> None:
        self.doing = self.failed = self.left = ""
        self._bulletin, self._rank, self._operations = bulletin, rank, operations
        self._process, self._host = this_process(), socket.gethostname()
        self._beats = 0
        self._lock = threading.RLock()

    def say(self) -> None:
        with self._lock:  # what is said last is posted last
            self._beats += 1
            said = {
                "beat": self._beats,
                "doing": self.doing,
                "place": place_of_main_thread(),
                "process": self._process,
                "host": self._host,
                "operation": self._operations.said(),
                "failed": self.failed,
                "left": self.left,
            }
            post = self._bulletin.post if self._bulletin.has_session else self._bulletin.post_openly
            post(f"alive/{self._rank}", said)

    def met(self) -> None:
        """There is a session. Who would end before it has spoken in that would never be missed."""
        with self._lock:
            self.say()
            self._bulletin.post_openly(f"alive/{self._rank}", None)

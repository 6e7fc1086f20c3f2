"""``python -m gradsplit.launch``, which is also the command ``mpi-torchrun``."""

import signal
import sys

# Until the launcher has handlers of its own: a KeyboardInterrupt in the middle of an import may be swallowed there.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from gradsplit.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())

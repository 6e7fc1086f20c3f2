"""``python -m gradsplit.launch``."""

import sys

from gradsplit.launch.cli import main

sys.exit(main())

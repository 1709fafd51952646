"""``python -m dynajax`` is the command line."""

import sys

from dynajax.cli import main

sys.exit(main())

"""`python -m ddp_lab` is `ddp-lab`."""

import sys

from .cli import main

sys.exit(main())

"""`python -m ddp_lab` is `ddp-lab`."""

import sys

from .cli.main import main

sys.exit(main())

"""`python -m paper --figure N`, in the folder of the notebooks."""

from __future__ import annotations

import sys

from ddp_lab.errors import DdpLabError

from .figures import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except DdpLabError as error:  # what it needs is missing
        sys.exit(str(error))

"""`python -m normswap` is `normswap`."""

import sys

from normswap.cli.app import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m tools.fetch` in a checkout: the command `iaj fetch`."""

import sys

from iaj.fetch import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m tools.quickstart` in a checkout, as `make quickstart` runs it: `iaj quickstart`."""

import sys

from iaj.quickstart import main

if __name__ == "__main__":
    sys.exit(main())

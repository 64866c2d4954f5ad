"""`python -m tools.convert_hf` in a checkout: the command `iaj convert`."""

import sys

from iaj.convert import main

if __name__ == "__main__":
    sys.exit(main())

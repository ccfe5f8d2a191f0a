"""`python -m clipwise` is the same as the command `clipwise`."""

import sys

from clipwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m waypost`` is the same as the command ``waypost``."""

import sys

from waypost.cli import main

if __name__ == "__main__":
    sys.exit(main())

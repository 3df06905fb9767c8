"""`python -m paceline.node`: a node launcher."""

import sys

from paceline.node.launcher import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m paceline.agent`: run an agent."""

import sys

from paceline.agent.main import main

if __name__ == "__main__":
    sys.exit(main())

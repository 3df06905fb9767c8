"""How the probe on a node is asked for stacks, and how its answer begins."""

STACKS = "--stacks"
MARK = "paceline-probe "  # begins the line with the answer: a site's start-up files may print others

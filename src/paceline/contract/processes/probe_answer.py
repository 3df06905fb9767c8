"""How the probe on a node is asked for stacks, and how its answer begins."""

STACKS = "--stacks"
# begins the line with the answer: a site's start-up files may print others
MARK = "paceline-probe "

"""The output of runs: merged from all ranks and attempts, as it grows, and when it is over."""

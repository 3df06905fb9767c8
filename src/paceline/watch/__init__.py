"""Read run folders and the scheduler to report on runs. Nothing here writes."""

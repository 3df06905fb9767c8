"""Pure functions from a Job to what will be done: a dry run prints the plan, and nothing else differs."""

"""What acts on this machine and on the scheduler. With `sandbox` and `node`, the only callers of subprocess."""

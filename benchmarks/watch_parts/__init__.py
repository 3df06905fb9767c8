"""The parts of benchmarks/watch.py, one per file, each with a `measure`."""

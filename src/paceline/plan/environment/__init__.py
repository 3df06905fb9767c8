"""A job's environment as lines of bash: modules, venv, conda, containers, and how to build them."""

"""The rows of all runs in a scratch folder, quickly: those that are over are kept in an index."""

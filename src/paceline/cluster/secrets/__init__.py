"""Reading files of secrets."""

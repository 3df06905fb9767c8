"""What single commands print: rows, facts, log lines and progress."""

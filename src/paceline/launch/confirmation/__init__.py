"""Submissions from another machine, whose answer may be lost: what each has led to."""

"""Notifications about a run, sent by the head agent: a webhook or a command of the user."""

"""The zygote: a process that imports torch once and forks the ranks."""

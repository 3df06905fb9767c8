"""One module per command and per subcommand with a file of its own; `paceline.cli` imports it when it is typed."""

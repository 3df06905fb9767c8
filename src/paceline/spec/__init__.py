"""What the user asked for: frozen, validated data from `paceline.toml` and the command line."""

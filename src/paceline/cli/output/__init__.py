"""How commands print: the console, tables, wrapped text, JSON and progress bars."""

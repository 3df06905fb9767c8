"""The results of a sweep as a table, a CSV file and an HTML page."""

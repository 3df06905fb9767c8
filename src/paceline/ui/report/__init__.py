"""A run or a sweep as one HTML file: the dashboard's pages with their answers inside."""

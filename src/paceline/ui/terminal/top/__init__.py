"""`paceline top`: a full-screen view of all runs, with Textual."""

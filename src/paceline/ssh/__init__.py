"""A cluster over SSH: the user's own `ssh`, one connection per login, and Paceline on the other side."""

"""Data goes to a cluster: rsync, over the connection that `paceline login` has opened."""

"""Send data to a cluster with rsync, over the connection that `paceline login` has opened."""

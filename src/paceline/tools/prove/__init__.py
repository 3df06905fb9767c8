"""`paceline prove`: the same training on different numbers of ranks, compared."""

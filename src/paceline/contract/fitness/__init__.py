"""How fit a node is: what its ranks measure, and which node that shows to be slow."""

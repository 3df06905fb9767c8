"""Send a project's code and settings to a cluster, with the request that needs them."""

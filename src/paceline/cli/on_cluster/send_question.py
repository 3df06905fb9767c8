"""The question before something goes to a cluster."""

from paceline.cli.on_cluster.cluster_request import confirm

__all__ = ["confirm"]

"""What the launch half and the run half share: environment names, files and their formats, and
small tools.

Standard library only, so that it runs on any Python that a node may have.
"""

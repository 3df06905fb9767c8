"""What the launch half and the run half share, and nothing else: environment names, files and their formats.

Standard library only, so that it runs on any Python that a node may have.
"""

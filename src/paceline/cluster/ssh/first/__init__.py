"""The first of several clusters: a run is submitted to each, and one of them may train it."""

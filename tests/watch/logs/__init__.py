"""Tests of the output of runs."""

"""Preparing and checking the data sets of all scales but smoke."""

"""Preparing and checking the data sets of scale=gpu and scale=paper."""

"""The data sets of scale=gpu and scale=paper: made, and checked."""

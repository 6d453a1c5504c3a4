"""What task=graph is made of: graphs on disk, sampling, models, and stores of features."""

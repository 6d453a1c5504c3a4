"""What is done with a trained model: it is exported, or asked for text."""

"""Starting workers: those of a run, of an elastic run, and of `co2.run`; and being one of them."""

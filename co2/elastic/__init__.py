"""Replicas that come and go (docs/elastic.md): who is there, and training that goes on with them.

Where replicas are fixed, nothing here is used.
"""

"""Copies of a whole service, and the way back from one: database first, then every object that it names."""

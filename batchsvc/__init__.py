"""Batch inference as a service: files, batches and money; knows no model code and loads no torch."""

__version__ = "0.2.0"

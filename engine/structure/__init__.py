"""Answers of a given form: a grammar is compiled once, and masks the tokens that may come next; no torch."""

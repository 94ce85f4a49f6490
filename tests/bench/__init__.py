"""Bounded load scripts; nothing here is a test that CI runs."""

"""The memory planner: what a model takes by purpose, what fits on which card, and how many blocks the engine gets.

Arithmetic alone: it loads no torch, so that the service and its command line may use it.
"""

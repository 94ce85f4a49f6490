"""The 25 inputs that break other batch services, each as a test with its number, through API, planner and engine.

Limits are OpenAI's where an input speaks of them. What such an input does to processes that are killed, to stores and
to both databases is tested elsewhere too: tests/faults/test_hostile_inputs.py, tests/faults/test_worker_kills.py.
"""

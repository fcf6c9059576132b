"""The parts of ``fuzz/faults.py``: replicas in processes of their own, their faults, and the invariants."""

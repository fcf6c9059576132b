"""What ``fuzz/faults.py`` is made of: replicas in processes of their own, what happens to them, what must hold."""

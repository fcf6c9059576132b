"""The local view of what the other replicas hold, from their logs."""

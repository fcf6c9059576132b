"""What the other replicas hold, as their logs say."""

"""What this replica does together with the others."""

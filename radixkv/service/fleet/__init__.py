"""Work that this replica does together with other replicas: jobs, pins, purges, quotas."""

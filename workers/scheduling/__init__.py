"""L1 as one state machine: the scheduler, the events that drive it, and its recording."""

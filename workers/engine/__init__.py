"""The decode worker: the step loop and what it reports."""

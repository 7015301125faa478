"""A worker's side of its node: connection, loads and saves, peer memory, administrator's verbs."""

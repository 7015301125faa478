"""The cache of one node: the coordinator that decides, and the service that carries out."""

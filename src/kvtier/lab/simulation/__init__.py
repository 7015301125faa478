"""A cluster in virtual time: the real routing, directory and coordinators; only computing and transfers are played."""

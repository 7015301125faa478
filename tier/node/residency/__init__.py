"""Which pages are in L3 and L4: room, demotion, and what requests used."""

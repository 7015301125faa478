"""Who of a deployment lives, stalls, or was killed for memory. Decides; acts nowhere."""

"""Pages: shape, format, envelope, checksum, identity, recipes, and the clear epochs that end them."""

"""Request traces: reading the public formats, and the requests and pages in them."""

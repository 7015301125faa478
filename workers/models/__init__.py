"""Models: shape, formats, files, text, forwards, and what a rank of a group computes."""

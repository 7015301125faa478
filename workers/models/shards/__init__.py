"""A tensor parallel rank's share of a model."""

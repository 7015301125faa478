"""The directory: who says it holds which pages."""

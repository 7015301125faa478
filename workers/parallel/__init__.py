"""A tensor parallel group: leader, ranks, and the numbered plan between them."""

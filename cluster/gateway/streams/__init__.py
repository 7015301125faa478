"""A request's way back: outputs of workers, text, unread chunks."""

"""From messages, registered templates and text to token ids with the scope of each block."""

"""The HTTP side of the front door: bodies in, JSON and server-sent events out. Decides nothing about generation."""

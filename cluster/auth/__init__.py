"""Who is asking: API keys, roles, and the hashed identity that the rest of the system sees."""

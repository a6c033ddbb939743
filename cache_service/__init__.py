"""Who holds which prefix: block keys, block events and the prefix index."""

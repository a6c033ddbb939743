"""The transport-free half of the front door: validated input in, text deltas out. Knows neither HTTP nor gRPC."""

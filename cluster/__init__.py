"""The shared contract, the front door and the assembly of Watchword."""

"""`watchword bench`: measures a running OpenAI-compatible server, ours or a peer's, over HTTP."""

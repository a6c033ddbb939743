"""What an experiment can be run against: an engine in this process, or any OpenAI-compatible server."""

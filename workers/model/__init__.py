"""The forward pass: what the model is (spec), what it weighs (weights), and how a batch of tokens runs through it."""

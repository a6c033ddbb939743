"""The pre-launch checklist against a live deployment: one line per property, each with what was seen."""

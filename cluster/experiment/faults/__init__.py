"""Planted faults: small changes of real engine code, put in by the composition root. No engine file knows of them.

They exist to prove that the experiment can see each kind. Nothing here can be reached without
WATCHWORD_ALLOW_PLANTED_FAULTS=1 in the environment.
"""

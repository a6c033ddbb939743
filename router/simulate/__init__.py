"""Drives the router's own policies with a discrete-event clock on recorded or generated traffic.

A model of scheduling, not of an engine: what it can show is which worker a policy picks and what waiting follows.
"""

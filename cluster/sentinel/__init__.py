"""Marker pairs through the live cluster: does anything of one request turn up in another, right now, on this worker?"""

"""Engines that behave in time without a model: on the wire for end-to-end runs, in virtual time for planning."""

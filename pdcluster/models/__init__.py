"""Models that need no download: made from an installed package or from a seed, then cached."""

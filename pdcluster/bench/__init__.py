"""Benchmarks of the proxy against others, on stand-in engines: what a relay costs, measured in one run, interleaved."""

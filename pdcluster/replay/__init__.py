"""Replay of request traces on an OpenAI endpoint: open loop, prefix sharing kept, what came measured and judged."""

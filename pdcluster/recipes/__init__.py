"""The recipe format: one model's published serving settings in layers, resolved into commands with an origin each.

The format and its semantics are those of the vllm-project/recipes collection. `library` reads a directory of it,
`resolve` turns one choice (variant, hardware, strategy, features) into argv and environment for every node.
"""

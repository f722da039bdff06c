"""The verbs of the command line, one module each; `pdcluster.cli` registers them."""

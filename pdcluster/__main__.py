"""`python -m pdcluster`."""

from pdcluster.cli import main

main()

"""`python -m retrax.trainer`: trains what a gin configuration says."""

import sys

from retrax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

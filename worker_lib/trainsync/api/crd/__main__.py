"""Prints the CRD."""

import sys

from trainsync.api.crd.generate import to_yaml

if __name__ == "__main__":
    sys.stdout.write(to_yaml())

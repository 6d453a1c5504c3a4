"""`python -m co2.lab`: see measure.py."""

import sys

from co2.lab.measure import main

if __name__ == "__main__":
    sys.exit(main())

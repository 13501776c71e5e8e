"""``python -m chunked_head``: what a call will take, what a model would get, whether an installation is right."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())

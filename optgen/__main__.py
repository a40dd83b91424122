"""`python -m optgen` is the command `optgen`."""

import sys

from optgen.driver.cli import main

sys.exit(main())

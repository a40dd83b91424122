"""The command `optgen`, and `python -m optgen`."""

import sys
import warnings


def main() -> int:
    """Run the command line and return its exit code."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, at its import: no command needs NumPy
    from optgen.driver.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

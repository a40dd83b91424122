"""The command `optgen`, and `python -m optgen`."""

import sys
import warnings

from optgen.base.extras import advice


def main() -> int:
    """Run the command line and return its exit code: 3 if a package that it needs is not installed."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, at its import: no command needs NumPy
    try:
        from optgen.driver.cli import main as run
    except ModuleNotFoundError as error:
        if (missing := advice(error)) is None:
            raise
        print(f"optgen: missing: {missing}", file=sys.stderr)
        return 3
    return run()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m samestep`."""

from samestep.cli.main import main

if __name__ == "__main__":
    main()

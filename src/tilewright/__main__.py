"""`python -m tilewright` is `tilewright`."""

from tilewright.cli.app import main

if __name__ == "__main__":
    main()

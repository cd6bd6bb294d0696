"""Run the command line as ``python -m ringweave``."""

from ringweave_command import main

if __name__ == "__main__":
    main()

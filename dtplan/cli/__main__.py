"""python -m dtplan.cli."""

from dtplan.cli import main

if __name__ == "__main__":
    main()

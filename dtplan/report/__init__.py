"""Views of a bound plan for the terminal and for machines."""

"""What this machine has of what dtplan can use, and what is missing costs. Works with torch broken or absent."""

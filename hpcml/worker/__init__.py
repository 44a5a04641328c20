"""What runs on a compute node around the payload. Standard library only, Python 3.9 or newer."""

"""Long forms of what the project claims; `make proof-NAME` runs one."""

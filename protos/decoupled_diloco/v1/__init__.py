"""Version 1 of the protocol: the .proto files and the modules generated from them."""

"""The contract of a scheme: what it declares, how it binds to a stack, and the parts it is built from."""

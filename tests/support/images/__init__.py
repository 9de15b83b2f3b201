"""What the images of the DSL engines take of a multiprocessor: `make check` builds them all and compares a table."""

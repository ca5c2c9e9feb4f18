"""All kinds of indexes, and how indexes are opened, tuned and updated."""

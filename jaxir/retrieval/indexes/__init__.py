"""Every kind of index, and how indexes are opened, tuned and updated."""

"""Small changes of meaning, planted one at a time to see which the tests notice. `make mutants`; docs/mutants.md."""

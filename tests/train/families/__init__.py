"""Every family of models that is shipped, under routes."""

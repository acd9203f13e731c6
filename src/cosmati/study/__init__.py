"""Many runs, and what can honestly be concluded from them."""

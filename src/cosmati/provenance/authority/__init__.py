"""Who may say of which data that it's of a class: an authority's repository of The Update Framework (TUF)."""

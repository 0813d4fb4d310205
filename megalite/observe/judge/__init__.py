"""Judge training programs of other frameworks: whether they train the same run in any layout."""

"""``attnreg fit``: the best classifier of some labelled texts, and the score that it will have on new ones."""

"""Views of a check: the card on a terminal, the HTML page, two checks side by side."""

"""How a check is shown: the card on a terminal, the HTML page, two checks side by side."""

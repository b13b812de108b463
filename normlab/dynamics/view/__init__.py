"""How simulations are shown: the terminal, the HTML page, figures and progress."""

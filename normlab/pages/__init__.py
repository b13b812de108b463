"""HTML pages: one shell, one kind of table, number formats and templates for every page that NormLab writes."""

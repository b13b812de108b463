"""HTML pages: layout, tables, number formatting and templates common to all pages that NormLab writes."""

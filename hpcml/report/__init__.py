"""The report of a run: what its folder holds, as one page, a picture or a Markdown text."""

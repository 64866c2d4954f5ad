"""Flags with which the tests of all studies start one: `<command with underscores>.py` of each.

`flags(request, folder)` makes what the study needs in a folder of its own, or takes a fixture of
`tests/test_studies.py`. A study without a file here needs no flag in its mode "smoke".
`STAYS = True` says that an unfinished run of it cannot be moved to another folder.
"""

"""`fairtrial view`: the runs of a store as web pages, served to this machine.

Pages are made on the server, links are relative, forms are plain GET requests, and every state of a page is its
address. `guard` stands before every route. Nothing here is imported by other packages, and starlette, uvicorn and
jinja2 are loaded only here.
"""

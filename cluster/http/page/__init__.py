"""The page at `/`: a chat that shows how tokens come, and how the engines are. Static files, no build step.

files  the files as routes, with the policy that browsers hold them to

page.html, page.css and icon.svg are what one sees. page.js joins the parts: api.js speaks HTTP, answer.js shows an
answer, engines.js the engines; figures.js has the calculations, without a browser.
"""

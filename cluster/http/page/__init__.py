"""The page at `/`: a chat that shows the origin of each token, and the state of the engines. Static files, no build
step.

files  the files as routes, with their content security policy

page.html, page.css and icon.svg are the layout. page.js joins the other scripts:

- api.js: HTTP requests, with the API key if the server needs one
- answer.js: one answer: text, tokens by origin, reasoning, figures
- markdown.js: Markdown as DOM nodes; vendor/marked.js (MIT, licence in the same folder) splits the text into tokens
- conversations.js: the history, stored in the browser
- settings.js: sampling, system prompt, view, style
- engines.js: the state of the engines, live
- figures.js: calculations that need no browser
- element.js: DOM nodes shared by the scripts
"""

"""The page at `/`: a chat that shows how tokens come, and how the engines are. Static files, no build step.

files  the files as routes, with the policy that browsers hold them to

page.html, page.css and icon.svg are what a user sees. page.js joins the other scripts:

- api.js: HTTP, with the API key where the server wants one
- answer.js: one answer: text, tokens by origin, reasoning, figures
- markdown.js: Markdown as DOM nodes; vendor/marked.js (MIT, its licence beside it) splits the text into tokens
- conversations.js: the history, in this browser alone
- settings.js: sampling, system prompt, view, style
- engines.js: the state of the engines, live
- figures.js: calculations, without a browser
- element.js: nodes that several scripts make
"""
